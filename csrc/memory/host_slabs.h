// Long-lived host memory for tensors: packed into slabs, pinned where the device has streams, bounded.
//
// Allocations of pinned memory are powers of two (HostMemory::round_up); one for each tensor would waste up to half of it.
// Slabs grow on demand with what is held already, and take tensors of any size one behind the other. A tensor keeps its
// slab alive. Each tensor has a storage of its own: Python may hold a storage for any time, and a shared one would not
// show which tensors are still in use.
//
// The memory of a freed tensor is reused once no copy uses it any more. Slabs look for such memory only when they are
// full, as this waits for the device.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "memory/host_memory.h"

namespace ldc {

class HostSlabs {
 public:
  /// `what` lies here, for messages. `wait_for_copies` returns when all copies that were queued from or to tensors of
  /// these slabs are done.
  HostSlabs(std::shared_ptr<HostMemory> memory, const char* what, std::function<void()> wait_for_copies)
      : memory_(std::move(memory)), what_(what), wait_for_copies_(std::move(wait_for_copies)) {}

  /// An uninitialised host tensor with the shape and dtype of `like`, which is contiguous.
  Tensor place(const Tensor& like);

  /// Takes memory for tensors of such sizes now, rather than when they are placed, and keeps it until the next call,
  /// with no sizes for example. Raises as place() does, and keeps nothing then.
  void reserve(const std::vector<int64_t>& sizes);

  int64_t bytes() const;  // of all slabs
  /// Frees the slabs in which no tensor lies, but for what is reserved. No copy from or to them may be under way.
  void free_unused();

 private:
  /// Ranges of a slab that hold nothing, by where they begin. Neighbours are one.
  class Gaps {
   public:
    explicit Gaps(int64_t bytes) : ranges_{{0, bytes}} {}
    /// Where `need` bytes begin, which are a gap no more; -1 if no gap is so large.
    int64_t take(int64_t need);
    void give(int64_t begin, int64_t bytes);

   private:
    std::map<int64_t, int64_t> ranges_;  // bytes, by begin
  };
  /// A tensor's part of a slab: shared by the slab and, as long as it lives, by the tensor.
  struct Part {
    std::shared_ptr<const HostMemory::Block> memory;
    int64_t begin = 0;
    int64_t bytes = 0;
    bool placed = false;  // a tensor lies here, or did: it may have been copied
  };
  struct Slab {
    std::shared_ptr<const HostMemory::Block> memory;
    Gaps gaps;
    std::vector<std::shared_ptr<Part>> parts;
  };

  static bool has_gone(const std::shared_ptr<Part>& part) { return part.use_count() == 1; }
  std::shared_ptr<Part> take(int64_t need);
  std::shared_ptr<Part> take_from_gaps(int64_t need);  // null if no gap is large enough
  /// Makes gaps of the parts that nobody has any more; unless no copies are under way, not of those of tensors.
  void reclaim(bool copies_are_done);

  const std::shared_ptr<HostMemory> memory_;
  const char* const what_;
  const std::function<void()> wait_for_copies_;
  std::vector<Slab> slabs_;
  int64_t reserved_ = 0;  // bytes of slabs that stay
};

}  // namespace ldc

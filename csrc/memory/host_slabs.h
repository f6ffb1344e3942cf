// Host memory that tensors live in for long: packed into slabs, pinned where the device has streams, bounded.
//
// Allocations of pinned memory are powers of two (HostMemory::round_up); one for each tensor would waste up to half of it.
// Slabs grow on demand with what is held already, and take tensors of any size one behind the other. A tensor keeps its
// slab alive. Each has a storage of its own, as Python may hold on to a
// storage for as long as anybody uses it, so nobody could tell when a shared one is needed no more.
#pragma once

#include <memory>
#include <vector>

#include "memory/host_memory.h"

namespace ldc {

class HostSlabs {
 public:
  /// `what` lies here, for messages.
  HostSlabs(std::shared_ptr<HostMemory> memory, const char* what) : memory_(std::move(memory)), what_(what) {}

  /// An uninitialised host tensor with the shape and dtype of `like`, which is contiguous.
  Tensor place(const Tensor& like);

  /// Takes memory for tensors of such sizes now, rather than when they are placed, and keeps it until the next call,
  /// with no sizes for example. Raises as place() does, and keeps nothing then.
  void reserve(const std::vector<int64_t>& sizes);

  int64_t bytes() const;  // of all slabs
  /// Frees the slabs in which no tensor lies, but for what is reserved. No copy from or to them may be under way.
  void free_unused();

 private:
  struct Slab {
    std::shared_ptr<const HostMemory::Block> memory;  // shared with the tensors that lie in it
    int64_t used = 0;
  };
  Slab& slab_for(int64_t need);

  const std::shared_ptr<HostMemory> memory_;
  const char* const what_;
  std::vector<Slab> slabs_;
  int64_t reserved_ = 0;  // bytes of slabs that stay
};

}  // namespace ldc

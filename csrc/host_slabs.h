// Host memory that tensors live in for long: packed into slabs, pinned where the device has streams, bounded.
//
// torch's allocator of pinned memory rounds every allocation up to a power of two; one allocation per tensor would waste
// up to half of it. Slabs are powers of two themselves, grow on demand with what is held already, and take tensors of
// any size one behind the other. A tensor keeps its slab alive. Each has a storage of its own, as Python may hold on to a
// storage for as long as anybody uses it, so nobody could tell when a shared one is needed no more.
#pragma once

#include <memory>
#include <vector>

#include "common.h"

namespace ldc {

class HostSlabs {
 public:
  /// `limit`: most bytes held; 0: no limit. `what` lies here, for messages.
  HostSlabs(Device device, int64_t limit, const char* what) : device_(device), limit_(limit), what_(what) {}

  /// An uninitialised host tensor with the shape and dtype of `like`, which is contiguous.
  Tensor place(const Tensor& like);

  int64_t bytes() const;  // of all slabs
  /// Frees the slabs in which no tensor lies. No copy from or to them may be under way.
  void trim();

 private:
  struct Slab {
    std::shared_ptr<Tensor> memory;  // shared with the tensors that lie in it
    int64_t used = 0;
  };
  Slab& slab_for(int64_t need);

  const Device device_;
  const int64_t limit_;
  const char* const what_;
  std::vector<Slab> slabs_;
};

}  // namespace ldc

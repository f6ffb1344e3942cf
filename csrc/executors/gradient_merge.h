// The last step of a reduction: what came over the wire goes into the gradient shard, which may have a wider dtype.
#pragma once

#include <memory>
#include <vector>

#include "base/common.h"

namespace ldc {

/// What was reduced, and the gradient that it goes to. Both are contiguous and have as many elements.
struct Merge {
  Tensor grad;
  Tensor sum;
  bool add;  // to the gradient, which is set to it otherwise
};

class GradientMerge {
 public:
  GradientMerge() = default;
  virtual ~GradientMerge() = default;
  GradientMerge(const GradientMerge&) = delete;
  GradientMerge& operator=(const GradientMerge&) = delete;

  /// Queues grad = sum, or grad += sum, for each, on the current stream.
  virtual void merge(const std::vector<Merge>& merges);
};

/// What suits the device. `blocks`: thread blocks of a kernel that leaves the rest of the device to compute; 0: as many
/// as were found to be best; at most 65 535.
std::unique_ptr<GradientMerge> make_gradient_merge(Device device, int64_t blocks = 0);

}  // namespace ldc

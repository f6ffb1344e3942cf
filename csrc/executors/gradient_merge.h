// The last step of a reduction: what came over the wire goes into the gradient shard, which may have a wider dtype.
#pragma once

#include <memory>

#include "base/common.h"

namespace ldc {

class GradientMerge {
 public:
  GradientMerge() = default;
  virtual ~GradientMerge() = default;
  GradientMerge(const GradientMerge&) = delete;
  GradientMerge& operator=(const GradientMerge&) = delete;

  /// Queues grad = sum, or grad += sum, on the current stream. Both are contiguous and have as many elements.
  virtual void merge(const Tensor& grad, const Tensor& sum, bool add);
};

/// What suits the device. `blocks`: thread blocks of a kernel that leaves the rest of the device to compute; 0: as many
/// as were found to be best; at most 65 535.
std::unique_ptr<GradientMerge> make_gradient_merge(Device device, int64_t blocks = 0);

}  // namespace ldc

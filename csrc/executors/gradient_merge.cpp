#include "executors/gradient_merge.h"

#ifdef LDC_WITH_NCCL
#include "executors/cuda_gradient_merge.h"
#endif

namespace ldc {

void GradientMerge::merge(const Tensor& grad, const Tensor& sum, bool add) { add ? grad.add_(sum) : grad.copy_(sum); }

std::unique_ptr<GradientMerge> make_gradient_merge(Device device, [[maybe_unused]] int64_t blocks) {
  LDC_CHECK_ARG(blocks >= 0 && blocks <= 65'535, "`blocks` must be between 0 and 65535, got ", blocks, ".");
#ifdef LDC_WITH_NCCL
  if (device.is_cuda()) return make_cuda_gradient_merge(device, blocks);
#endif
  return std::make_unique<GradientMerge>();
}

}  // namespace ldc

#include "executors/gradient_merge.h"

#include "memory/views.h"

#ifdef LDC_WITH_NCCL
#include "executors/cuda_gradient_merge.h"
#endif

namespace ldc {

void GradientMerge::merge(const std::vector<Merge>& merges) {
  std::vector<Copy> copies;
  for (const auto& [grad, sum, add] : merges) {
    if (add) {
      grad.add_(sum);
    } else {
      copies.push_back({grad, sum});
    }
  }
  copy_all(copies);
}

std::unique_ptr<GradientMerge> make_gradient_merge(Device device, [[maybe_unused]] int64_t blocks) {
  LDC_CHECK_ARG(blocks >= 0 && blocks <= 65'535, "`blocks` must be between 0 and 65535, got ", blocks, ".");
#ifdef LDC_WITH_NCCL
  if (device.is_cuda()) return make_cuda_gradient_merge(device, blocks);
#endif
  return std::make_unique<GradientMerge>();
}

}  // namespace ldc

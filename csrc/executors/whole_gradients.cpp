#include "executors/whole_gradients.h"

namespace ldc {

void WholeGradients::add(const std::vector<Gradient>& gradients, const GiveBack& give_back) {
  const PlainTensors plain;
  for (const Gradient& gradient : gradients) {
    const auto known = sums_.find(gradient.param->id);
    if (known != sums_.end()) {
      known->second.value.add_(gradient.value);
      continue;
    }
    // A copy even where the dtype fits: the caller's tensor is not ours to add to.
    const Tensor sum = allocate_with_retry(give_back, [&] {
      return gradient.value.detach().to(gradient.param->grad.scalar_type(), /*non_blocking=*/false, /*copy=*/true,
                                        c10::MemoryFormat::Contiguous);
    });
    sums_.emplace(gradient.param->id, Gradient{gradient.param, sum, gradient.wire});
  }
}

Gradient WholeGradients::complete(Gradient last) {
  const auto known = sums_.find(last.param->id);
  if (known == sums_.end()) return last;
  const PlainTensors plain;
  Gradient sum = std::move(known->second);
  sums_.erase(known);
  sum.value.add_(last.value);
  return sum;
}

std::vector<Gradient> WholeGradients::take(Ids ids) {
  std::sort(ids.begin(), ids.end());
  std::vector<Gradient> taken;
  for (const int64_t id : ids) {
    const auto known = sums_.find(id);
    if (known == sums_.end()) continue;
    taken.push_back(std::move(known->second));
    sums_.erase(known);
  }
  return taken;
}

void WholeGradients::forget(const Ids& ids) {
  for (const int64_t id : ids) sums_.erase(id);
}

}  // namespace ldc

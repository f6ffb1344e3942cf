#include "executors/executor.h"

namespace ldc {

Executor::Executor(int64_t graph_id, const Ids& ids, Reduction reduction, const bool& boundary, Registry& registry,
                   GatherEngine& gathers, ReduceEngine& reductions)
    : gathers_(gathers),
      graph_id_(graph_id),
      ids_(ids),
      members_(ids.begin(), ids.end()),
      reduction_(reduction),
      boundary_(boundary),
      reductions_(reductions) {
  for (const int64_t id : ids) registry.at(id);  // raises for an id that nobody registered
}

void Executor::check_members(const Ids& ids) const {
  for (const int64_t id : ids) {
    LDC_CHECK_ARG(members_.contains(id), "parameter id ", id, " does not belong to graph ", graph_id_,
                  ". List it in register_graph (register_graph_z1, _z2, _z3).");
  }
}

void Executor::prefetch(const Ids& ids, const std::vector<Dtype>& dtypes) {
  check_members(ids);
  gathers_.launch(ids, dtypes);
}

Tensor Executor::allgather(int64_t id, Dtype dtype) {
  check_members({id});
  gathers_.launch({id}, {dtype});
  return gathers_.placeholder(id);
}

Tensor Executor::wait_copy(int64_t id) {
  check_members({id});
  return gathers_.copy(id);
}

std::vector<Tensor> Executor::wait(const Ids& ids) {
  check_members(ids);
  std::vector<Tensor> tensors;
  tensors.reserve(ids.size());
  for (const int64_t id : ids) tensors.push_back(gathers_.wait(id));
  return tensors;
}

void Executor::release_use(int64_t id, int64_t n_users) {
  check_members({id});
  LDC_CHECK_ARG(n_users > 0, "release_param: `n_users` must be positive, got ", n_users, " for parameter id ", id, ".");
  LDC_CHECK_ARG(gathers_.is_gathered(id), "release_param: parameter id ", id, " is not gathered",
                ". Release it once per use, `n_users` times after every allgather_param.");
  const auto count = uses_left_.try_emplace(id, UseCount{n_users, n_users}).first;
  LDC_CHECK_ARG(count->second.users == n_users, "release_param: `n_users` of parameter id ", id, " was ",
                count->second.users, " at its first release and is now ", n_users, ". Pass the same number each time.");
  if (--count->second.left > 0) return;
  uses_left_.erase(count);
  release_one(id);
}

void Executor::release(const Ids& ids) {
  check_members(ids);
  for (const int64_t id : ids) release_one(id);
}

void Executor::release_at_boundary(const Ids& ids) {
  check_members(ids);
  if (!boundary_) return;
  for (const int64_t id : ids) release_one(id);
}

void Executor::reduce(const Ids& ids, const std::vector<Tensor>& grads) {
  check_members(ids);
  holds_gradients() ? reductions_.hold(ids, grads) : reductions_.reduce(ids, grads);
}

void Executor::reduce(int64_t id, const Tensor& grad) {
  check_members({id});
  holds_gradients() ? reductions_.hold({id}, {grad}) : reductions_.collect(id, grad);
}

void Executor::end_backward() {
  if (boundary_) reductions_.reduce_held(ids_);
  reductions_.flush();
}

std::unique_ptr<Executor> make_executor(int64_t stage, const std::string& reduce, int64_t graph_id, const Ids& ids,
                                        const bool& boundary, Registry& registry, GatherEngine& gathers,
                                        ReduceEngine& reductions) {
  LDC_CHECK_ARG(stage >= 1 && stage <= 3, "register_graph: `stage` must be 1, 2 or 3, got ", stage, ".");
  LDC_CHECK_ARG(reduce.empty() || reduce == "every" || reduce == "boundary",
                "register_graph: `reduce` must be 'every', 'boundary' or None, got '", reduce, "'.");
  const bool late = reduce.empty() ? stage == 1 : reduce == "boundary";
  const Reduction reduction = late ? Reduction::at_boundary : Reduction::every_micro_batch;
  const auto make = [&]<typename Stage>() -> std::unique_ptr<Executor> {
    return std::make_unique<Stage>(graph_id, ids, reduction, boundary, registry, gathers, reductions);
  };
  if (stage == 1) return make.operator()<Zero1Executor>();
  if (stage == 2) return make.operator()<Zero2Executor>();
  return make.operator()<Zero3Executor>();
}

}  // namespace ldc

// What the operators do with a runtime: one at a time, with the executor that the graph has.
#include <ATen/ops/empty.h>

#include "bindings/runtime.h"

namespace ldc {

void Runtime::share_shards() {
  const auto lock = enter();
  gathers_.share_shards();
}

Tensor Runtime::allgather_param(int64_t graph_id, int64_t id, Dtype dtype) {
  const auto lock = enter();
  return executor(graph_id).allgather(id, dtype);
}

Tensor Runtime::wait_allgather(int64_t graph_id, int64_t id) {
  const auto lock = enter();
  return executor(graph_id).wait_copy(id);
}

void Runtime::prefetch_params_fused(int64_t graph_id, const Ids& ids, const std::vector<Dtype>& dtypes) {
  const auto lock = enter();
  LDC_CHECK_ARG(dtypes.empty() || dtypes.size() == ids.size(), "prefetch_params_fused: ", ids.size(), " ids but ",
                dtypes.size(), " dtypes.");
  executor(graph_id).prefetch(ids, dtypes);
}

std::vector<Tensor> Runtime::wait_allgather_fused(int64_t graph_id, const Ids& ids) {
  const auto lock = enter();
  return executor(graph_id).wait(ids);
}

void Runtime::release_param(int64_t graph_id, int64_t id, int64_t n_users) {
  const auto lock = enter();
  executor(graph_id).release_use(id, n_users);
}

void Runtime::release_params_fused(int64_t graph_id, const Ids& ids) {
  const auto lock = enter();
  executor(graph_id).release(ids);
}

void Runtime::release_params_at_boundary(int64_t graph_id, const Ids& ids) {
  const auto lock = enter();
  Executor& owner = executor(graph_id);
  check_in_backward("release_params_at_boundary");
  owner.release_at_boundary(ids);
}

void Runtime::reduce_grads_fused(int64_t graph_id, const Ids& ids, const std::vector<Tensor>& grads) {
  const auto lock = enter();
  Executor& owner = executor(graph_id);
  check_in_backward("reduce_grads_fused");
  owner.reduce(ids, grads);
}

void Runtime::reduce_grad(int64_t graph_id, int64_t id, const Tensor& grad) {
  const auto lock = enter();
  Executor& owner = executor(graph_id);
  check_in_backward("reduce_grad");
  owner.reduce(id, grad);
}

void Runtime::free_tensors(const std::vector<Tensor>& tensors) {
  const auto lock = enter();
  const auto freeable = [&](const Tensor& tensor) { return tensor.defined() && tensor.numel() >= free_threshold_; };
  for (const Tensor& tensor : tensors) {
    if (!freeable(tensor)) continue;
    const c10::Storage& storage = tensor.storage();
    LDC_CHECK_ARG(!(registry_.owns(storage) || gathers_.owns(storage)), "free_tensors: a tensor of shape ",
                  tensor.sizes(), " is in use: it is a gathered parameter, a shard or a gradient. Release parameters ",
                  "with release_param.");
    LDC_CHECK_ARG(!reductions_.owns(storage), "free_tensors: a tensor of shape ", tensor.sizes(), " is in use: it was ",
                  "handed over to be reduced. Call end_backward first.");
    LDC_CHECK_ARG(!offloads_.owns(storage), "free_tensors: a tensor of shape ", tensor.sizes(), " is in use: it is ",
                  "offloaded. Call reload_tensor and wait_reload first (reload_tensors_fused and wait_copies_fused).");
  }
  if (profiling_) return;
  // Nobody but the compute stream reads an activation (copies to the host keep their source themselves), so its memory
  // may return to that stream's pool at once.
  for (const Tensor& tensor : tensors) {
    if (freeable(tensor)) tensor.set_data(at::empty({0}, tensor.options()));
  }
}

Tensor Runtime::offload_tensor(const Tensor& tensor, int64_t graph_id, int64_t id) {
  const auto lock = enter();
  executor(graph_id);  // raises for a graph that nobody registered
  return offloads_.offload(tensor, id);
}

Tensor Runtime::wait_offload(int64_t graph_id, int64_t id) {
  const auto lock = enter();
  executor(graph_id);
  return offloads_.wait_offload(id);
}

Tensor Runtime::reload_tensor(const Tensor& tensor, int64_t graph_id, int64_t id) {
  const auto lock = enter();
  executor(graph_id);
  return offloads_.reload(tensor, id);
}

Tensor Runtime::wait_reload(int64_t graph_id, int64_t id) {
  const auto lock = enter();
  executor(graph_id);
  return offloads_.wait_reload(id);
}

std::vector<Tensor> Runtime::offload_tensors_fused(int64_t graph_id, const std::vector<Tensor>& tensors) {
  const auto lock = enter();
  executor(graph_id);
  return offloads_.offload_group(tensors);
}

std::vector<Tensor> Runtime::reload_tensors_fused(int64_t graph_id, const std::vector<Tensor>& hosts) {
  const auto lock = enter();
  executor(graph_id);
  return offloads_.reload_group(hosts);
}

void Runtime::wait_copies_fused(int64_t graph_id, const std::vector<Tensor>& hosts) {
  const auto lock = enter();
  executor(graph_id);
  offloads_.wait_copies(hosts);
}

void Runtime::offload_parameter(int64_t graph_id, int64_t id) {
  const auto lock = enter();
  executor(graph_id).check_members({id});
  offloads_.offload_param(id);
}

void Runtime::reload_parameter(int64_t graph_id, int64_t id) {
  const auto lock = enter();
  executor(graph_id).check_members({id});
  offloads_.reload_param(id);
}

void Runtime::reserve_states(const std::vector<int64_t>& sizes) {
  const auto lock = enter();
  states_.reserve(sizes);
}

Tensor Runtime::host_shard(int64_t numel, ScalarType dtype) {
  const auto lock = enter();
  return host_shards_.place(numel, dtype);
}

Tensor Runtime::state_home(const Tensor& like) {
  const auto lock = enter();
  return states_.home(like);
}

void Runtime::expect_states(std::vector<std::vector<Tensor>> chunks, std::vector<Ids> slots) {
  const std::lock_guard lock(mutex_);  // as settle_states
  states_.expect(std::move(chunks), std::move(slots));
}

void Runtime::reload_states(int64_t graph_id, int64_t count) {
  const auto lock = enter();
  executor(graph_id);
  check_in_backward("reload_states");
  if (phase_.boundary) states_.advance(count);
}

std::vector<std::vector<Tensor>> Runtime::take_states() {
  const auto lock = enter();
  return states_.take();
}

void Runtime::drop_states() {
  const std::lock_guard lock(mutex_);  // as settle_states
  states_.drop();
}

void Runtime::wait_states(int64_t graph_id, int64_t count) {
  const auto lock = enter();
  executor(graph_id);
  states_.depart(count);
}

void Runtime::begin_states(int64_t slot_bytes) {
  const auto lock = enter();
  states_.begin(slot_bytes);
}

std::vector<Tensor> Runtime::fetch_states(int64_t slot, const std::vector<Tensor>& homes) {
  const auto lock = enter();
  return states_.fetch(slot, homes);
}

void Runtime::await_states(int64_t slot) {
  const auto lock = enter();
  states_.arrive(slot);
}

void Runtime::stow_states(int64_t slot, const std::vector<Tensor>& sources, const std::vector<Tensor>& homes) {
  const auto lock = enter();
  states_.stow(slot, sources, homes);
}

void Runtime::settle_states() {
  const std::lock_guard lock(mutex_);  // also after an abort: an optimizer's step that failed is cleaned up
  states_.settle();
}

void Runtime::release_states() {
  const std::lock_guard lock(mutex_);  // as above
  states_.release();
}

void Runtime::synchronize_states() {
  const std::lock_guard lock(mutex_);  // also after an abort or the end: states can still be saved
  states_.synchronize();
}

Tensor Runtime::like_gathered(int64_t id, Dtype dtype) {
  const auto lock = enter();
  const Param& param = registry_.at(id);
  return at::empty(param.shape, param.shard.options().dtype(dtype.value_or(param.shard.scalar_type())).device(c10::kMeta));
}

Tensor Runtime::gather(const Tensor& shard, int64_t id, c10::IntArrayRef size, ScalarType dtype) {
  const auto lock = enter();
  return gathers_.gather_now(shard, size, dtype, name_of(id));
}

Tensor Runtime::reduce(const Tensor& grad, int64_t id, c10::IntArrayRef shard_size, ScalarType dtype) {
  const auto lock = enter();
  const Dtype wire = registry_.contains(id) ? registry_.at(id).reduce_dtype : Dtype{};
  return reductions_.reduce_now(grad, shard_size, dtype, wire, name_of(id));
}

}  // namespace ldc

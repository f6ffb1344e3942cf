// The operators `torch.ops.dc.*`. Programs call them; each finds its Runtime by the serial in the upper bits of an id.
//
// Per-parameter forms carry the names, arguments and meanings of DeepSpeed's DeepCompile runtime. Fused forms do the
// same for a block of parameters in one host call. `gather` and `reduce` are functional: what tracing sees, correct as
// they stand. Fake kernels and autograd for them are registered in Python.
//
// Per-parameter forms may stand in functions that PyTorch compiles. A compiler gives the memory of what it has read for
// the last time to somebody else, be it an argument or a result. So what they keep after they return is a copy, and what
// they return is the caller's: a copy, or memory that the runtime does not look at again. That they do something, in the
// order in which they are called, is registered in Python. Tensors that wait_allgather_fused returns live in runtime
// memory, valid until the parameter is released, and reduce_grads_fused keeps gradients until they are reduced: those
// are for programs, which know, and nothing is copied there.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "bindings/runtime.h"

namespace ldc {
namespace {

std::vector<Dtype> optional_dtypes(const std::optional<std::vector<ScalarType>>& dtypes) {
  return dtypes ? std::vector<Dtype>(dtypes->begin(), dtypes->end()) : std::vector<Dtype>{};
}

/// An operator at work: its runtime, which it keeps alive, and its turn with it.
class Call {
 public:
  /// `id`: of a graph or a parameter.
  explicit Call(int64_t id) : runtime_(Runtime::of(id)), turn_(runtime_->enter()) {}
  Engines* operator->() const { return &*turn_; }

 private:
  std::shared_ptr<Runtime> runtime_;
  Turn turn_;
};

Tensor allgather_param(const Tensor& /*param*/, int64_t graph_id, int64_t ds_id, Dtype dtype) {
  return Call(graph_id)->executor(graph_id).allgather(ds_id, dtype);
}

Tensor wait_allgather(const Tensor& /*v*/, int64_t graph_id, int64_t ds_id) {
  return Call(graph_id)->executor(graph_id).wait_copy(ds_id);
}

Tensor release_param(const Tensor& dummy, int64_t graph_id, int64_t ds_id, int64_t n_users) {
  Call(graph_id)->executor(graph_id).release_use(ds_id, n_users);
  return dummy.clone();
}

void prefetch_params_fused(int64_t graph_id, at::TensorList /*params*/, std::vector<int64_t> ids,
                           std::optional<std::vector<ScalarType>> dtypes) {
  const std::vector<Dtype> wanted = optional_dtypes(dtypes);
  const Call call(graph_id);
  LDC_CHECK_ARG(wanted.empty() || wanted.size() == ids.size(), "prefetch_params_fused: ", ids.size(), " ids but ",
                wanted.size(), " dtypes.");
  call->executor(graph_id).prefetch(ids, wanted);
}

std::vector<Tensor> wait_allgather_fused(int64_t graph_id, std::vector<int64_t> ids) {
  return Call(graph_id)->executor(graph_id).wait(ids);
}

void release_params_fused(int64_t graph_id, std::vector<int64_t> ids) {
  Call(graph_id)->executor(graph_id).release(ids);
}

void release_params_at_boundary(int64_t graph_id, std::vector<int64_t> ids) {
  Call(graph_id)->executor_in_backward("release_params_at_boundary", graph_id).release_at_boundary(ids);
}

Tensor reduce_grad(const Tensor& grad, int64_t graph_id, int64_t ds_id) {
  Call(graph_id)->executor_in_backward("reduce_grad", graph_id).reduce(ds_id, grad);
  return at::empty({0}, grad.options());
}

void reduce_grads_fused(int64_t graph_id, at::TensorList grads, std::vector<int64_t> ids) {
  Call(graph_id)->executor_in_backward("reduce_grads_fused", graph_id).reduce(ids, grads.vec());
}

void end_backward(int64_t graph_id) { Call(graph_id)->end_backward(graph_id); }

void free_tensors(at::TensorList tensors, int64_t graph_id) { Call(graph_id)->free_tensors(tensors.vec()); }

// What moves to the host and back belongs to no executor; a graph that nobody registered is refused all the same.

Tensor offload_tensor(const Tensor& tensor, int64_t graph_id, int64_t id) {
  const Call call(graph_id);
  call->executor(graph_id);
  return call->offloads.offload(tensor, id);
}

Tensor wait_offload(const Tensor& /*tensor*/, int64_t graph_id, int64_t id) {
  const Call call(graph_id);
  call->executor(graph_id);
  return call->offloads.wait_offload(id);
}

Tensor reload_tensor(const Tensor& tensor, int64_t graph_id, int64_t id) {
  const Call call(graph_id);
  call->executor(graph_id);
  return call->offloads.reload(tensor, id);
}

Tensor wait_reload(const Tensor& /*tensor*/, int64_t graph_id, int64_t id) {
  const Call call(graph_id);
  call->executor(graph_id);
  return call->offloads.wait_reload(id);
}

std::vector<Tensor> offload_tensors_fused(int64_t graph_id, at::TensorList tensors) {
  const Call call(graph_id);
  call->executor(graph_id);
  return call->offloads.offload_group(tensors.vec());
}

std::vector<Tensor> reload_tensors_fused(int64_t graph_id, at::TensorList hosts) {
  const Call call(graph_id);
  call->executor(graph_id);
  return call->offloads.reload_group(hosts.vec());
}

void wait_copies_fused(int64_t graph_id, at::TensorList hosts) {
  const Call call(graph_id);
  call->executor(graph_id);
  call->offloads.wait_copies(hosts.vec());
}

void offload_parameter(const Tensor& /*param*/, int64_t graph_id, int64_t id) {
  const Call call(graph_id);
  call->executor(graph_id).check_members({id});
  call->offloads.offload_param(id);
}

void reload_parameter(const Tensor& /*param*/, int64_t graph_id, int64_t id) {
  const Call call(graph_id);
  call->executor(graph_id).check_members({id});
  call->offloads.reload_param(id);
}

/// Does nothing but in the backward before the optimizer steps.
void reload_states(int64_t graph_id, std::vector<int64_t> chunks, std::vector<int64_t> /*sizes*/) {
  const Call call(graph_id);
  call->executor_in_backward("reload_states", graph_id);
  if (call->phase.boundary) call->states.advance(static_cast<int64_t>(chunks.size()));
}

void wait_states(int64_t graph_id, std::vector<int64_t> chunks, std::vector<int64_t> /*sizes*/) {
  const Call call(graph_id);
  call->executor(graph_id);
  call->states.settle_first(static_cast<int64_t>(chunks.size()));
}

Tensor gather(const Tensor& shard, int64_t ds_id, c10::SymIntArrayRef size, ScalarType dtype) {
  const Call call(ds_id);
  return call->gathers.gather_now(shard, C10_AS_INTARRAYREF_SLOW(size), dtype, call->name_of(ds_id));
}

Tensor reduce(const Tensor& grad, int64_t ds_id, c10::SymIntArrayRef shard_size, ScalarType dtype) {
  const Call call(ds_id);
  const Dtype wire = call->registry.contains(ds_id) ? call->registry.at(ds_id).reduce_dtype : Dtype{};
  return call->reductions.reduce_now(grad, C10_AS_INTARRAYREF_SLOW(shard_size), dtype, wire, call->name_of(ds_id));
}

/// Nothing here depends on the device, so both keys get the same kernels (a build without CUDA too).
void implement_for_device(torch::Library& m) {
  m.impl("allgather_param", &allgather_param);
  m.impl("wait_allgather", &wait_allgather);
  m.impl("release_param", &release_param);
  m.impl("reduce_grad", &reduce_grad);
  m.impl("offload_tensor", &offload_tensor);
  m.impl("wait_offload", &wait_offload);
  m.impl("reload_tensor", &reload_tensor);
  m.impl("wait_reload", &wait_reload);
  m.impl("offload_parameter", &offload_parameter);
  m.impl("reload_parameter", &reload_parameter);
  m.impl("gather", &gather);
  m.impl("reduce", &reduce);
}

}  // namespace
}  // namespace ldc

TORCH_LIBRARY(dc, m) {
  m.def("allgather_param(Tensor param, int graph_id, int ds_id, ScalarType? dtype=None) -> Tensor");
  m.def("wait_allgather(Tensor v, int graph_id, int ds_id) -> Tensor");
  m.def("release_param(Tensor dummy, int graph_id, int ds_id, int n_users) -> Tensor");
  m.def("prefetch_params_fused(int graph_id, Tensor[] params, int[] ids, ScalarType[]? dtypes=None) -> ()");
  m.def("reduce_grad(Tensor grad, int graph_id, int ds_id) -> Tensor");
  m.def("end_backward(int graph_id) -> ()");
  m.def("free_tensors(Tensor[] tensors, int graph_id=0) -> ()");
  // Tensors in host memory; `id` is unique in the runtime from offload_tensor to wait_reload.
  m.def("offload_tensor(Tensor tensor, int graph_id, int id) -> Tensor");
  m.def("wait_offload(Tensor tensor, int graph_id, int id) -> Tensor");
  m.def("reload_tensor(Tensor tensor, int graph_id, int id) -> Tensor");
  m.def("wait_reload(Tensor tensor, int graph_id, int id) -> Tensor");
  // The same for a group of activations. Their host tensors need no numbers: they carry what has to be waited for. What
  // stays on the device is returned itself, and the annotation says so.
  m.def("offload_tensors_fused(int graph_id, Tensor(a)[] tensors) -> Tensor(a)[]");
  m.def("reload_tensors_fused(int graph_id, Tensor(a)[] tensors) -> Tensor(a)[]");
  m.def("wait_copies_fused(int graph_id, Tensor[] tensors) -> ()");
  // Optimizer states in host memory, a few chunks further in the order in which they step; sizes are for people.
  m.def("reload_states(int graph_id, int[] chunks, int[] sizes) -> ()");
  m.def("wait_states(int graph_id, int[] chunks, int[] sizes) -> ()");
  // Shards in host memory; `id` is the parameter's.
  m.def("offload_parameter(Tensor param, int graph_id, int id) -> ()");
  m.def("reload_parameter(Tensor param, int graph_id, int id) -> ()");
  // Views of one slot: they alias each other, and the annotation says so.
  m.def("wait_allgather_fused(int graph_id, int[] ids) -> Tensor(a)[]");
  m.def("release_params_fused(int graph_id, int[] ids) -> ()");
  m.def("release_params_at_boundary(int graph_id, int[] ids) -> ()");
  m.def("reduce_grads_fused(int graph_id, Tensor[] grads, int[] ids) -> ()");
  m.def("gather(Tensor shard, int ds_id, SymInt[] size, ScalarType dtype) -> Tensor", {at::Tag::pt2_compliant_tag});
  m.def("reduce(Tensor grad, int ds_id, SymInt[] shard_size, ScalarType dtype) -> Tensor",
        {at::Tag::pt2_compliant_tag});
}

// No tensor argument, or a list that may be empty: there is no device key to dispatch on.
TORCH_LIBRARY_IMPL(dc, CompositeExplicitAutograd, m) {
  m.impl("prefetch_params_fused", &ldc::prefetch_params_fused);
  m.impl("end_backward", &ldc::end_backward);
  m.impl("free_tensors", &ldc::free_tensors);
  m.impl("wait_allgather_fused", &ldc::wait_allgather_fused);
  m.impl("release_params_fused", &ldc::release_params_fused);
  m.impl("release_params_at_boundary", &ldc::release_params_at_boundary);
  m.impl("reduce_grads_fused", &ldc::reduce_grads_fused);
  m.impl("offload_tensors_fused", &ldc::offload_tensors_fused);
  m.impl("reload_tensors_fused", &ldc::reload_tensors_fused);
  m.impl("wait_copies_fused", &ldc::wait_copies_fused);
  m.impl("reload_states", &ldc::reload_states);
  m.impl("wait_states", &ldc::wait_states);
}

TORCH_LIBRARY_IMPL(dc, CPU, m) { ldc::implement_for_device(m); }
TORCH_LIBRARY_IMPL(dc, CUDA, m) { ldc::implement_for_device(m); }

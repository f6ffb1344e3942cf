#include "bindings/engines.h"

#include <ATen/ops/empty.h>

#include "bindings/runtime_table.h"

namespace ldc {

Engines::Engines(const Group& gather_group, const Group& reduce_group, const Group& replica_group, Device device,
                 const RuntimeOptions& options, int64_t serial)
    : serial(serial),
      device(device),
      communicator_kind(resolve_kind(options.communicator, device)),
      free_threshold(options.free_activation_threshold),
      gather_communicator(make_gather_communicator(communicator_kind, gather_group, device, options)),
      reduce_communicator(make_reduce_communicator(communicator_kind, reduce_group, replica_group, *gather_communicator,
                                                   device, options)),
      host_memory(std::make_shared<HostMemory>(device, options.host_limit)),
      shard_slabs(host_memory, "parameter shards", [device] { synchronize_device(device); }),
      registry(device, gather_communicator->world_size()),
      gathers(device, gather_communicator, registry, stats, options),
      reductions(device, reduce_communicator, registry, stats, options),
      offloads(device, registry, gathers, stats, host_memory),
      states(device, stats, host_memory) {
  gathers.retry_with([this] { return give_back(); });
  reductions.retry_with([this] { return give_back(); });
  offloads.retry_with([this] { return give_back(); });
  states.retry_with([this] { return give_back(); });
}

Executor& Engines::executor(int64_t graph_id) {
  const auto found = executors.find(graph_id);
  LDC_CHECK_ARG(found != executors.end(), "graph ", graph_id, " (local ", local_of(graph_id),
                ") is not registered with runtime ", serial,
                ". Call register_graph (register_graph_z1, _z2, _z3) first.");
  return *found->second;
}

Executor& Engines::executor_in_backward(std::string_view operation, int64_t graph_id) {
  Executor& owner = executor(graph_id);
  check_in_backward(operation);
  return owner;
}

void Engines::check_in_backward(std::string_view operation) const {
  LDC_CHECK(phase.backward, operation, ": no backward pass is under way. Call start_backward(update) first.");
}

void Engines::check_serial(std::string_view operation, int64_t id) const {
  LDC_CHECK_ARG(id >= 0 && serial_of(id) == serial, operation, ": id ", id, " does not carry serial ", serial,
                ". Ids are (serial << 32) | local, and never negative.");
}

void Engines::check_health() {
  gather_communicator->check_health();
  reduce_communicator->check_health();
}

std::string Engines::name_of(int64_t id) const {
  return registry.contains(id) ? registry.params().at(id).name : c10::str("id ", id);
}

void Engines::end_backward(int64_t graph_id) {
  executor_in_backward("end_backward", graph_id).end_backward();
  if (!phase.graphs_end_it) return;
  reductions.drain();
  offloads.settle();
  check_health();
  if (phase.boundary) phase.new_weights = phase.new_gradients = true;
}

void Engines::invalidate() {
  for (const auto& [id, executor] : executors) executor->reset();
  gathers.invalidate();
  offloads.invalidate();
}

void Engines::free_tensors(const std::vector<Tensor>& tensors) {
  const auto freeable = [&](const Tensor& tensor) { return tensor.defined() && tensor.numel() >= free_threshold; };
  for (const Tensor& tensor : tensors) {
    if (!freeable(tensor)) continue;
    const c10::Storage& storage = tensor.storage();
    LDC_CHECK_ARG(!(registry.owns(storage) || gathers.owns(storage)), "free_tensors: a tensor of shape ",
                  tensor.sizes(), " is in use: it is a gathered parameter, a shard or a gradient. Release parameters ",
                  "with release_param.");
    LDC_CHECK_ARG(!reductions.owns(storage), "free_tensors: a tensor of shape ", tensor.sizes(), " is in use: it was ",
                  "handed over to be reduced. Call end_backward first.");
    LDC_CHECK_ARG(!offloads.owns(storage), "free_tensors: a tensor of shape ", tensor.sizes(), " is in use: it is ",
                  "offloaded. Call reload_tensor and wait_reload first (reload_tensors_fused and wait_copies_fused).");
  }
  if (profiling) return;
  // Nobody but the compute stream reads an activation (copies to the host keep their source themselves), so its memory
  // may return to that stream's pool at once.
  for (const Tensor& tensor : tensors) {
    if (freeable(tensor)) tensor.set_data(at::empty({0}, tensor.options()));
  }
}

int64_t Engines::give_back() {
  const int64_t freed = reductions.give_back();
  return freed > 0 ? freed : gathers.give_back();
}

void Engines::free_unused() {
  gathers.arena().free_unused();
  reductions.arena().free_unused();
  offloads.free_unused();
  states.settle();
  states.reserve({});
  states.synchronize();
  if (shard_slabs.bytes() == 0) return;
  synchronize_device(device);  // it may still use shards that nobody holds any more
  shard_slabs.free_unused();
}

void Engines::clear(const std::atomic<bool>& aborted) {
  if (!aborted) synchronize_device(device);  // buffers and communicators are in use until the device is idle
  executors.clear();
  offloads.clear();
  if (!aborted) {
    states.settle();
    states.synchronize();
  }
  reductions.clear();
  gathers.clear();
  gathers.drop_windows();
  registry.clear();
  if (!aborted) shard_slabs.free_unused();  // what nobody holds; else it goes with the tensors
}

}  // namespace ldc

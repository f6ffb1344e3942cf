#include "bindings/faces.h"

#include "bindings/runtime.h"
#include "communicators/same_on_all_ranks.h"
#include "memory/host_shards.h"

namespace ldc {

void Setup::register_param(int64_t id, std::string name, std::vector<int64_t> shape, const Tensor& shard,
                           const std::optional<Tensor>& grad, Dtype reduce_dtype, bool persistent) {
  const Turn turn = runtime_.enter();
  turn->check_serial("register_param", id);
  const Tensor buffer = grad.value_or(Tensor());
  if (turn->registry.contains(id)) {
    // A refusal loses neither gradient nor shard.
    turn->registry.check(id, name, shape, shard, buffer, reduce_dtype);
    turn->reductions.forget(id);  // nothing may hold on to the tensors that are replaced
    turn->gathers.invalidate(id);
    turn->offloads.forget(id);
  }
  turn->registry.add(id, std::move(name), std::move(shape), shard, buffer, reduce_dtype, persistent);
}

void Setup::register_graph(int64_t graph_id, const Ids& ids, int64_t stage, const std::string& reduce) {
  const Turn turn = runtime_.enter();
  turn->check_serial("register_graph", graph_id);
  turn->executors[graph_id] = make_executor(stage, reduce, graph_id, ids, turn->phase.boundary, turn->registry,
                                            turn->gathers, turn->reductions);
}

void Setup::validate() {
  const Turn turn = runtime_.enter();
  std::vector<std::string> lines;
  for (const int64_t id : turn->registry.ids()) {
    const Param& param = turn->registry.at(id);
    lines.push_back(c10::str("parameter ", local_of(id), " '", param.name, "' of shape ", Shape(param.shape), " in ",
                             param.shard.scalar_type(), " shards of shape ", param.shard.sizes(), ", ",
                             param.grad.defined() ? "trained in " : "frozen",
                             param.grad.defined() ? c10::toString(param.grad.scalar_type()) : "", ", reduced in ",
                             param.reduce_dtype ? c10::toString(*param.reduce_dtype) : "its gradient's dtype"));
  }
  for (const auto& [id, executor] : turn->executors) {
    std::string line = c10::str("graph ", local_of(id), " of stage ", executor->stage(), ", reduced ",
                                executor->reduction() == Reduction::at_boundary ? "at the boundary" : "every time",
                                ", with parameters");
    for (const int64_t member : executor->ids()) line += c10::str(" ", local_of(member));
    lines.push_back(std::move(line));
  }
  require_same_on_all_ranks(*turn->gather_communicator, turn->device, "what is registered", lines);
}

void Setup::share_shards() { runtime_.enter()->gathers.share_shards(); }

void Parameters::set_persistent(int64_t id, bool persistent) {
  runtime_.enter()->registry.at(id).persistent = persistent;
}

void Parameters::invalidate(std::optional<int64_t> id) {
  const Turn turn = runtime_.enter();
  if (!id) return turn->invalidate();
  turn->registry.at(*id);  // raises for an id that nobody registered
  turn->gathers.invalidate(*id);
}

void Parameters::refetch() { runtime_.enter()->gathers.refetch(); }

void Parameters::order_gathers() { runtime_.enter()->gathers.order_behind_current_stream(); }

void Gradients::start_backward(const Ids& reset_ids, bool update) {
  const Turn turn = runtime_.enter();
  turn->reductions.start_accumulation(reset_ids);
  turn->phase.backward = true;
  turn->phase.boundary = update;
  turn->phase.graphs_end_it = false;
}

void Gradients::finish_backward() {
  const Turn turn = runtime_.enter();
  turn->phase.backward = false;
  if (turn->phase.boundary) turn->reductions.reduce_held(turn->registry.ids());
  turn->reductions.drain();
  turn->offloads.settle();  // the optimizer reads the shards
  turn->check_health();
}

Ids Gradients::ids() { return runtime_.enter()->reductions.ids_with_grad(); }

void Gradients::replace(int64_t id, const Tensor& grad) {
  const Turn turn = runtime_.enter();
  turn->reductions.drain();  // none may still be writing to the old buffer
  turn->registry.replace_grad(id, grad);
}

void Gradients::free(const Ids& ids) { runtime_.enter()->reductions.free_grads(ids); }

void Passes::start_forward() {
  const Turn turn = runtime_.enter();
  if (turn->phase.new_weights) {
    const std::string_view held = turn->reductions.any_held();
    LDC_CHECK(held.empty(), "start_forward: the gradient of '", held,
              "' was accumulated but not reduced in the last step. Call end_backward for every graph that it used, or "
              "reset() to drop it.");
    turn->invalidate();
    turn->phase.new_weights = false;
  }
  turn->phase.forward = true;
  turn->phase.backward = false;
  turn->gathers.refetch();
}

void Passes::end_forward() {
  const Turn turn = runtime_.enter();
  LDC_CHECK(turn->phase.forward, "end_forward: no forward pass is under way. Call start_forward() first.");
  turn->phase.forward = false;
}

void Passes::start_backward(bool update) {
  const Turn turn = runtime_.enter();
  turn->phase.forward = false;
  turn->phase.backward = true;
  turn->phase.boundary = update;
  turn->phase.graphs_end_it = true;
  if (std::exchange(turn->phase.new_gradients, false)) turn->reductions.start_accumulation(turn->registry.ids());
}

void Passes::end_backward(int64_t graph_id) { runtime_.enter()->end_backward(graph_id); }

void Passes::enable_profiling(bool enable) {
  const Turn turn = runtime_.enter();
  if (enable == turn->profiling) return;
  turn->reductions.drain();
  turn->gathers.set_dry(enable);
  turn->reductions.set_dry(enable);
  turn->profiling = enable;
}

bool Passes::is_profiling() const { return runtime_.is_profiling(); }

void States::reserve(const std::vector<int64_t>& sizes) { runtime_.enter()->states.reserve(sizes); }

Tensor States::host_buffer(const Tensor& like) { return runtime_.enter()->states.host_buffer(like); }

void States::expect(std::vector<Chunk> chunks, std::vector<Ids> slots) {
  runtime_.enter_ended()->states.expect(std::move(chunks), std::move(slots));
}

std::vector<States::Chunk> States::take() { return runtime_.enter()->states.take(); }

void States::forget_fetched() { runtime_.enter_ended()->states.forget_fetched(); }

void States::begin(int64_t slot_bytes) { runtime_.enter()->states.begin(slot_bytes); }

States::Chunk States::fetch(int64_t slot, const Chunk& host_buffers) {
  return runtime_.enter()->states.fetch(slot, host_buffers);
}

void States::wait(int64_t slot) { runtime_.enter()->states.wait(slot); }

void States::stow(int64_t slot, const Chunk& sources, const Chunk& host_buffers) {
  runtime_.enter()->states.stow(slot, sources, host_buffers);
}

void States::settle() { runtime_.enter_ended()->states.settle(); }

void States::release() { runtime_.enter_ended()->states.release(); }

void States::synchronize() { runtime_.enter_ended()->states.synchronize(); }

void Graphs::begin() { runtime_.enter()->recorder.begin(); }

void Graphs::prepare() { runtime_.enter()->recorder.prepare(); }

void Graphs::fork() { runtime_.enter()->recorder.fork(); }

std::shared_ptr<Recording> Graphs::join() { return runtime_.enter()->recorder.join(); }

void Graphs::cancel() { runtime_.enter_ended()->recorder.cancel(); }

bool Graphs::fits(const Recording& recording) { return runtime_.enter()->recorder.fits(recording); }

void Graphs::replayed(const Recording& recording, std::string_view program) {
  const Turn turn = runtime_.enter();
  turn->recorder.replayed(recording);
  turn->gather_communicator->watch_replay(program);
}

void Graphs::forget() { runtime_.enter_ended()->recorder.forget(); }

Tensor Memory::host_shard(int64_t numel, ScalarType dtype) {
  const Turn turn = runtime_.enter();
  return place_host_shard(turn->shard_slabs, numel, dtype, turn->device);
}

void Memory::free_tensors(const std::vector<Tensor>& tensors) { runtime_.enter()->free_tensors(tensors); }

void Memory::free_unused() { runtime_.enter()->free_unused(); }

int64_t Memory::give_back() { return runtime_.enter()->give_back(); }

void Memory::free_buffers() {
  const Turn turn = runtime_.enter();
  turn->gathers.free_windows();
  turn->reductions.arena().free_unused();
}

std::tuple<int64_t, int64_t, int32_t> Memory::windows() {
  const Turn turn = runtime_.enter_ended();
  const Windows* windows = turn->gathers.windows();
  if (windows == nullptr) return {0, 0, 0};
  return {windows->bytes(), windows->threshold(), windows->digest()};
}

}  // namespace ldc

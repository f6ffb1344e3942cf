#include "bindings/runtime.h"

#include <unistd.h>

#include "communicators/make_communicators.h"
#include "communicators/same_on_all_ranks.h"
#include "communicators/symmetric_communicator.h"

namespace ldc {

namespace {

Device with_index(Device device) {
  if (!has_streams(device) || device.has_index()) return device;
  return c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

}  // namespace

std::shared_ptr<Runtime> Runtime::create(Group gather_group, Group reduce_group, Group replica_group,
                                         Device device, const RuntimeOptions& options) {
  const std::initializer_list<std::pair<const char*, int64_t>> sizes{
      {"reduce_window", options.reduce_window},
      {"reduce_bucket_size", options.reduce_bucket_size},
      {"free_activation_threshold", options.free_activation_threshold},
      {"host_limit", options.host_limit},
      {"max_ctas", options.max_ctas},
      {"symmetric_threshold", options.symmetric_threshold}};
  for (const auto& [name, value] : sizes) {
    LDC_CHECK_ARG(value >= 0, "Runtime: `", name, "` must not be negative, got ", value, ".");
  }
  LDC_CHECK_ARG(options.timeout >= 0 && options.timeout < 1e9, "Runtime: `timeout` must be in [0, 1e9) seconds, got ",
                options.timeout, ".");
  LDC_CHECK_ARG(options.cta_cluster >= 0 && options.cta_cluster <= 8, "Runtime: `cta_cluster` must be 0 to 8, got ",
                options.cta_cluster, ".");
  const int64_t serial = reserve_serial(options.serial);
  try {
    auto runtime = std::make_shared<Runtime>(gather_group, reduce_group, replica_group, with_index(device), options,
                                             serial);
    enter_runtime(serial, runtime);
    return runtime;
  } catch (...) {
    forget_serial(serial);
    throw;
  }
}

Runtime::Runtime(const Group& gather_group, const Group& reduce_group, const Group& replica_group, Device device,
                 const RuntimeOptions& options, int64_t serial)
    : serial_(serial),
      process_(getpid()),
      device_(device),
      communicator_kind_(resolve_kind(options.communicator, device)),
      gather_communicator_(make_gather_communicator(communicator_kind_, gather_group, device, options, stats_)),
      reduce_communicator_(make_reduce_communicator(communicator_kind_, reduce_group, replica_group, device, options)),
      free_threshold_(options.free_activation_threshold),
      host_memory_(std::make_shared<HostMemory>(device, options.host_limit,
                                                NumaPlace{options.numa_node, options.numa_cpus})),
      host_shards_(device, host_memory_),
      registry_(device, gather_communicator_->world_size()),
      gathers_(device, gather_communicator_, registry_, stats_, options),
      reductions_(device, reduce_communicator_, registry_, stats_, options),
      offloads_(device, registry_, gathers_, stats_, host_memory_),
      states_(device, stats_, host_memory_) {
  LDC_CHECK_ARG(gather_communicator_->world_size() == reduce_communicator_->world_size() &&
                    gather_communicator_->rank() == reduce_communicator_->rank(),
                "Runtime: `gather_group` (rank ", gather_communicator_->rank(), " of ",
                gather_communicator_->world_size(), ") and `reduce_group` (rank ", reduce_communicator_->rank(), " of ",
                reduce_communicator_->world_size(), ") must have the same ranks.");
  // The engines' callers hold the mutex.
  gathers_.relieve_with([this] { return give_back(); });
  reductions_.relieve_with([this] { return give_back(); });
  offloads_.relieve_with([this] { return give_back(); });
  states_.relieve_with([this] { return give_back(); });
  if (communicator_kind_ == "nccl") {
    watchdog_ = std::make_unique<Watchdog>(std::vector{gather_communicator_, reduce_communicator_},
                                           options.limit(),
                                           [this](const std::string& reason) { give_up(reason); });
  }
}

Runtime::~Runtime() {
  try {
    shut_down(End::aborted);
  } catch (const std::exception& error) {
    TORCH_WARN("lightning_deepcompile: runtime ", serial_, " did not end cleanly: ", error.what());
  }
}

std::unique_lock<std::mutex> Runtime::enter() {
  std::unique_lock lock(mutex_);
  LDC_CHECK(!closed_, "runtime ", serial_, " was closed.");
  if (aborted_) {
    const std::lock_guard failure(failure_mutex_);
    LDC_CHECK_WIRE(false, "runtime ", serial_, " was aborted on rank ", rank(), failure_.empty() ? "." : ": ",
                   failure_);
  }
  return lock;
}

Executor& Runtime::executor(int64_t graph_id) {
  const auto found = executors_.find(graph_id);
  LDC_CHECK_ARG(found != executors_.end(), "graph ", graph_id, " (local ", local_of(graph_id),
                ") is not registered with runtime ", serial_,
                ". Call register_graph (register_graph_z1, _z2, _z3) first.");
  return *found->second;
}

std::string Runtime::name_of(int64_t id) const {
  return registry_.contains(id) ? registry_.params().at(id).name : c10::str("id ", id);
}

void Runtime::check_serial(std::string_view operation, int64_t id) const {
  LDC_CHECK_ARG(id >= 0 && serial_of(id) == serial_, operation, ": id ", id, " does not carry serial ", serial_,
                ". Ids are (serial << 32) | local, and never negative.");
}

void Runtime::register_param(int64_t id, std::string name, std::vector<int64_t> shape, const Tensor& shard,
                             const std::optional<Tensor>& grad, Dtype reduce_dtype, bool persistent) {
  const auto lock = enter();
  check_serial("register_param", id);
  const Tensor buffer = grad.value_or(Tensor());
  if (registry_.contains(id)) {
    registry_.check(id, name, shape, shard, buffer, reduce_dtype);  // a refusal loses neither gradient nor shard
    reductions_.forget(id);  // nothing may hold on to the tensors that are replaced
    gathers_.invalidate(id);
    offloads_.forget(id);
  }
  registry_.add(id, std::move(name), std::move(shape), shard, buffer, reduce_dtype, persistent);
}

void Runtime::update_param_grad_buffer(int64_t id, const Tensor& grad) {
  const auto lock = enter();
  reductions_.drain();  // none may still be writing to the old buffer
  registry_.replace_grad(id, grad);
}

void Runtime::set_persistent(int64_t id, bool persistent) {
  const auto lock = enter();
  registry_.at(id).persistent = persistent;
}

void Runtime::register_graph(int64_t graph_id, const Ids& ids, int64_t stage, const std::string& reduce) {
  const auto lock = enter();
  check_serial("register_graph", graph_id);
  executors_[graph_id] =
      make_executor(stage, reduce, graph_id, ids, phase_.boundary, registry_, gathers_, reductions_);
}

void Runtime::validate_registration() {
  const auto lock = enter();
  std::vector<std::string> lines;
  for (const int64_t id : registry_.ids()) {
    const Param& param = registry_.at(id);
    lines.push_back(c10::str("parameter ", local_of(id), " '", param.name, "' of shape ", Shape(param.shape), " in ",
                             param.shard.scalar_type(), " shards of shape ", param.shard.sizes(), ", ",
                             param.grad.defined() ? "trained in " : "frozen",
                             param.grad.defined() ? c10::toString(param.grad.scalar_type()) : "", ", reduced in ",
                             param.reduce_dtype ? c10::toString(*param.reduce_dtype) : "its gradient's dtype"));
  }
  for (const auto& [id, executor] : executors_) {
    std::string line = c10::str("graph ", local_of(id), " of stage ", executor->stage(), ", reduced ",
                                executor->reduction() == Reduction::at_boundary ? "at the boundary" : "every time",
                                ", with parameters");
    for (const int64_t member : executor->ids()) line += c10::str(" ", local_of(member));
    lines.push_back(std::move(line));
  }
  require_same_on_all_ranks(*gather_communicator_, device_, "what is registered", lines);
}

void Runtime::start_backward(const Ids& reset_ids, bool update) {
  const auto lock = enter();
  reductions_.start_accumulation(reset_ids);
  phase_.backward = true;
  phase_.boundary = update;
  phase_.graphs_end_it = false;
}

void Runtime::finish_backward() {
  const auto lock = enter();
  phase_.backward = false;
  if (phase_.boundary) reductions_.reduce_held(registry_.ids());
  reductions_.drain();
  offloads_.settle();  // the optimizer reads the shards
  check_health();
}

void Runtime::check_health() {
  gather_communicator_->check_health();
  reduce_communicator_->check_health();
}

void Runtime::start_forward() {
  const auto lock = enter();
  if (phase_.new_weights) {
    LDC_CHECK(reductions_.any_held().empty(), "start_forward: the gradient of '", reductions_.any_held(),
              "' was accumulated but not reduced in the last step. Call end_backward for every graph that it used, or "
              "reset() to drop it.");
    forget_gathered();
    phase_.new_weights = false;
  }
  phase_.forward = true;
  phase_.backward = false;
  gathers_.refetch();
}

void Runtime::end_forward() {
  const auto lock = enter();
  LDC_CHECK(phase_.forward, "end_forward: no forward pass is under way. Call start_forward() first.");
  phase_.forward = false;
}

void Runtime::start_backward(bool update) {
  const auto lock = enter();
  phase_.forward = false;
  phase_.backward = true;
  phase_.boundary = update;
  phase_.graphs_end_it = true;
  if (std::exchange(phase_.new_gradients, false)) reductions_.start_accumulation(registry_.ids());
}

void Runtime::end_backward(int64_t graph_id) {
  const auto lock = enter();
  Executor& ending = executor(graph_id);
  check_in_backward("end_backward");
  ending.end_backward();
  if (!phase_.graphs_end_it) return;
  reductions_.drain();
  offloads_.settle();
  check_health();
  if (phase_.boundary) phase_.new_weights = phase_.new_gradients = true;
}

void Runtime::check_in_backward(std::string_view operation) const {
  LDC_CHECK(phase_.backward, operation, ": no backward pass is under way. Call start_backward(update) first.");
}

void Runtime::invalidate_gathered_param(int64_t id) {
  const auto lock = enter();
  registry_.at(id);  // raises for an id that nobody registered
  gathers_.invalidate(id);
}

void Runtime::clear_all_gathered_params() { invalidate(); }

void Runtime::enable_profiling(bool enable) {
  const auto lock = enter();
  if (enable == profiling_) return;
  reductions_.drain();
  gathers_.set_dry(enable);
  reductions_.set_dry(enable);
  profiling_ = enable;
}

void Runtime::reset() {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  executors_.clear();
  phase_ = {};
  reductions_.abandon();
  try {
    if (!aborted_) gathers_.invalidate();
    offloads_.abandon();
  } catch (const std::exception& error) {
    TORCH_WARN("lightning_deepcompile: dropped parameters whose gather had failed: ", message_of(error));
  }
  gathers_.clear();
}

Ids Runtime::ids_with_grad() {
  const auto lock = enter();
  return reductions_.ids_with_grad();
}

void Runtime::free_grads(const Ids& ids) {
  const auto lock = enter();
  reductions_.free_grads(ids);
}

void Runtime::invalidate() {
  const auto lock = enter();
  forget_gathered();
}

void Runtime::forget_gathered() {
  for (const auto& [id, executor] : executors_) executor->reset();
  gathers_.invalidate();
  offloads_.invalidate();
}

bool Runtime::communicates() {
  const auto lock = enter();
  return gathers_.in_flight() || reductions_.in_flight();
}

void Runtime::order_gathers() {
  const auto lock = enter();
  gathers_.order_behind_current_stream();
}

void Runtime::refetch() {
  const auto lock = enter();
  gathers_.refetch();
}

void Runtime::clear_arena() {
  const auto lock = enter();
  gathers_.arena().clear();
  reductions_.arena().clear();
  offloads_.trim();
  states_.settle();
  states_.reserve({});
  states_.synchronize();
  if (host_shards_.bytes() == 0) return;
  synchronize_device(device_);  // it may still use shards that nobody holds any more
  host_shards_.trim();
}

int64_t Runtime::relieve() {
  const auto lock = enter();
  return give_back();
}

int64_t Runtime::give_back() {
  const int64_t freed = reductions_.relieve();
  return freed > 0 ? freed : gathers_.relieve();
}

std::map<std::string, int64_t> Runtime::stats() {
  const std::lock_guard lock(mutex_);  // readable after the end, too
  const auto* symmetric = dynamic_cast<const SymmetricCommunicator*>(gather_communicator_.get());
  return {
      {"gathers", stats_.gathers},
      {"gather_groups", stats_.gather_groups},
      {"gathered_bytes", stats_.gathered_bytes},
      {"gather_hits", stats_.gather_hits},
      {"symmetric_gathers", stats_.symmetric_gathers},
      {"symmetric_bytes", symmetric == nullptr ? 0 : symmetric->workspace_bytes()},
      {"reductions", stats_.reductions},
      {"reduce_groups", stats_.reduce_groups},
      {"reduced_bytes", stats_.reduced_bytes},
      {"copied_grads", stats_.copied_grads},
      {"sent_away_bytes", stats_.sent_away_bytes},
      {"away_peak_bytes", stats_.away_peak_bytes},
      {"fetched_bytes", stats_.fetched_bytes},
      {"offloaded_bytes", stats_.offloaded_bytes},
      {"reloaded_bytes", stats_.reloaded_bytes},
      {"host_bytes", offloads_.host_bytes() + states_.host_bytes()},
      {"stayed_tensors", stats_.stayed_tensors},
      {"host_node", host_memory_->node()},
      {"host_shard_bytes", host_shards_.bytes()},
      {"state_bytes", states_.device_bytes()},
      {"state_peak_bytes", stats_.state_peak_bytes},
      {"arena_bytes", gathers_.arena().bytes() + reductions_.arena().bytes()},
      {"arena_peak_bytes", gathers_.arena().peak_bytes() + reductions_.arena().peak_bytes()},
  };
}

void Runtime::reset_stats() {
  const std::lock_guard lock(mutex_);
  stats_ = {};
  gathers_.arena().reset_peak();
  reductions_.arena().reset_peak();
}

}  // namespace ldc

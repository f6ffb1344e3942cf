#include "bindings/runtime.h"

#include <unistd.h>

#include <chrono>

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
      {"symmetric_threshold", options.symmetric_threshold}};
  for (const auto& [name, value] : sizes) {
    LDC_CHECK_ARG(value >= 0, "Runtime: `", name, "` must not be negative, got ", value, ".");
  }
  LDC_CHECK_ARG(options.timeout >= 0 && options.timeout < 1e9, "Runtime: `timeout` must be in [0, 1e9) seconds, got ",
                options.timeout, ".");
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
    : process_(getpid()), engines_(gather_group, reduce_group, replica_group, device, options, serial) {
  if (communicator() == "nccl") {
    watchdog_ = std::make_unique<Watchdog>(
        std::vector{engines_.gather_communicator, engines_.reduce_communicator}, options.limit(),
        [this](const std::string& reason) { fail(reason); });
  }
}

Runtime::~Runtime() {
  try {
    end(End::aborted);
  } catch (const std::exception& error) {
    TORCH_WARN("lightning_deepcompile: runtime ", serial(), " did not end cleanly: ", error.what());
  }
}

bool Runtime::is_copy() const { return getpid() != process_; }

Turn Runtime::enter() {
  Turn turn = enter_ended();
  LDC_CHECK(!closed_, "runtime ", serial(), " was closed.");
  if (aborted_) {
    const std::lock_guard failure(failure_mutex_);
    LDC_CHECK_WIRE(false, "runtime ", serial(), " was aborted on rank ", rank(), failure_.empty() ? "." : ": ",
                   failure_);
  }
  return turn;
}

std::map<std::string, int64_t> Runtime::stats() {
  const Turn turn = enter_ended();
  const Windows* windows = turn->gathers.windows();
  const Stats& counts = turn->stats;
  Arena& gathered = turn->gathers.arena();
  Arena& reduced = turn->reductions.arena();
  return {
      {"gathers", counts.gathers},
      {"gather_groups", counts.gather_groups},
      {"gathered_bytes", counts.gathered_bytes},
      {"gather_hits", counts.gather_hits},
      {"symmetric_gathers", counts.symmetric_gathers},
      {"symmetric_bytes", windows == nullptr ? 0 : windows->bytes()},
      {"reductions", counts.reductions},
      {"reduce_groups", counts.reduce_groups},
      {"reduced_bytes", counts.reduced_bytes},
      {"copied_grads", counts.copied_grads},
      {"sent_away_bytes", counts.sent_away_bytes},
      {"away_peak_bytes", counts.away_peak_bytes},
      {"fetched_bytes", counts.fetched_bytes},
      {"offloaded_bytes", counts.offloaded_bytes},
      {"reloaded_bytes", counts.reloaded_bytes},
      {"host_bytes", turn->offloads.host_bytes() + turn->states.host_bytes()},
      {"stayed_tensors", counts.stayed_tensors},
      {"host_shard_bytes", turn->shard_slabs.bytes()},
      {"state_bytes", turn->states.device_bytes()},
      {"state_peak_bytes", counts.state_peak_bytes},
      {"arena_bytes", gathered.bytes() + reduced.bytes()},
      {"arena_peak_bytes", gathered.peak_bytes() + reduced.peak_bytes()},
  };
}

std::map<std::string, std::vector<Operation>> Runtime::history() const {
  std::map<std::string, std::vector<Operation>> all;
  for (auto& [set, operations] : engines_.gather_communicator->history()) all["gathers over " + set] = operations;
  for (auto& [set, operations] : engines_.reduce_communicator->history()) all["reductions over " + set] = operations;
  return all;
}

void Runtime::reset_stats() {
  const Turn turn = enter_ended();
  turn->stats = {};
  turn->gathers.arena().reset_peak();
  turn->reductions.arena().reset_peak();
}

void Runtime::reset() {
  const Turn turn = enter_ended();
  if (closed_) return;
  turn->executors.clear();
  turn->phase = {};
  turn->reductions.reset();
  try {
    if (!aborted_) turn->gathers.invalidate();
    turn->offloads.reset();
  } catch (const std::exception& error) {
    TORCH_WARN("lightning_deepcompile: dropped parameters whose gather had failed: ", message_of(error));
  }
  turn->gathers.clear();
}

void Runtime::abort() noexcept {
  aborted_ = true;
  abort_together({engines_.gather_communicator.get(), engines_.reduce_communicator.get()});
}

void Runtime::fail(const std::string& reason) noexcept {
  {
    const std::lock_guard lock(failure_mutex_);
    failure_ = reason;
  }
  abort();
}

void Runtime::close() { end(End::together); }

void Runtime::close(double wait_seconds) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::duration<double>(wait_seconds);
  for (const std::future<void>& peer : end(End::alone)) peer.wait_until(limit);
}

std::vector<std::future<void>> Runtime::end(End how) {
  std::vector<std::future<void>> pending;
  if (is_copy()) return pending;  // its threads, its device and its peers are another process'; so may the mutex be
  const Turn turn = enter_ended();
  if (std::exchange(closed_, true)) return pending;
  forget_serial(serial());
  if (how == End::aborted) abort();
  turn->clear(aborted_);
  for (Communicator* communicator : {turn->gather_communicator.get(), turn->reduce_communicator.get()}) {
    how == End::alone ? communicator->retire(pending) : communicator->close();
  }
  watchdog_.reset();  // until here it frees this thread from what hangs
  return pending;
}

}  // namespace ldc

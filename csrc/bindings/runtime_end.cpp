// How a runtime ends: with its peers, without waiting for them, or at once.
#include <unistd.h>

#include <chrono>

#include "bindings/runtime.h"

namespace ldc {

void Runtime::abort() noexcept {
  aborted_ = true;
  abort_together({gather_communicator_.get(), reduce_communicator_.get()});
}

void Runtime::give_up(const std::string& reason) noexcept {
  {
    const std::lock_guard lock(failure_mutex_);
    failure_ = reason;
  }
  abort();
}

void Runtime::close() { shut_down(End::together); }

void Runtime::retire(double wait_seconds) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::duration<double>(wait_seconds);
  for (const std::future<void>& end : shut_down(End::alone)) end.wait_until(limit);
}

bool Runtime::is_copy() const { return getpid() != process_; }

std::vector<std::future<void>> Runtime::shut_down(End end) {
  std::vector<std::future<void>> pending;
  if (is_copy()) return pending;  // its threads, its device and its peers are another process'; so may the mutex be
  const std::lock_guard lock(mutex_);
  if (std::exchange(closed_, true)) return pending;
  forget_serial(serial_);
  if (end == End::aborted) abort();
  if (!aborted_) synchronize_device(device_);  // buffers and communicators are in use until the device is idle
  executors_.clear();
  offloads_.clear();
  if (!aborted_) {
    states_.settle();
    states_.synchronize();
  }
  reductions_.clear();
  gathers_.clear();
  registry_.clear();
  if (!aborted_) host_shards_.trim();  // what nobody holds; else it goes with the tensors
  for (Communicator* communicator : {gather_communicator_.get(), reduce_communicator_.get()}) {
    end == End::alone ? communicator->retire(pending) : communicator->close();
  }
  watchdog_.reset();  // until here it frees this thread from what hangs
  return pending;
}

}  // namespace ldc

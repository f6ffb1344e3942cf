#include "communicators/watchdog.h"

#include <algorithm>

namespace ldc {

Watchdog::Watchdog(std::vector<std::shared_ptr<Communicator>> watched, std::chrono::milliseconds limit,
                   std::function<void(const std::string&)> on_failure)
    : watched_(std::move(watched)), limit_(limit), on_failure_(std::move(on_failure)), thread_([this] { run(); }) {}

void Watchdog::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Watchdog::run() {
  using std::chrono::milliseconds;
  const milliseconds period = std::clamp(limit_ / 10, milliseconds(10), milliseconds(1000));
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, period, [this] { return stopping_; })) {
    lock.unlock();
    const std::string failure = diagnose();
    if (!failure.empty()) return on_failure_(failure);
    lock.lock();
  }
}

std::string Watchdog::diagnose() const {
  try {
    for (const auto& communicator : watched_) {
      if (std::string failure = communicator->diagnose(limit_); !failure.empty()) return failure;
    }
  } catch (const std::exception& error) {
    return message_of(error);  // a device that answers with errors finishes nothing either
  }
  return {};
}

}  // namespace ldc

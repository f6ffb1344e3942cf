// The watchdog: a thread that notices when communication will not finish, since nobody else can. The thread that issued
// a collective has gone on, and the device only waits.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "communicators/communicator.h"

namespace ldc {

class Watchdog {
 public:
  /// Asks each communicator a few times per `limit` (at least once a second) whether it will finish, and calls
  /// `on_failure` with the first answer that says no; then its work is done. `on_failure` runs on the watchdog's thread.
  Watchdog(std::vector<std::shared_ptr<Communicator>> watched, std::chrono::milliseconds limit,
           std::function<void(const std::string&)> on_failure);
  ~Watchdog() { stop(); }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  /// Ends the thread and waits for it. Idempotent; not from `on_failure`.
  void stop();

 private:
  void run();
  std::string diagnose() const;

  std::vector<std::shared_ptr<Communicator>> watched_;
  std::chrono::milliseconds limit_;
  std::function<void(const std::string&)> on_failure_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace ldc

// Launched operations that may not be done: the watchdog's view of communication in stream order.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "communicators/history.h"

namespace ldc {

/// Operations of one rank in the order in which they were handed over, by one thread at a time. Communicators that
/// share a stream share a list, so that the first entry is the one that everything else waits for.
class InFlight {
 public:
  /// `captured`: whether what goes to a stream becomes part of a graph. Such an operation is not one that finishes, and
  /// nobody may ask for its event.
  explicit InFlight(Device device, std::function<bool(const Stream&)> captured = {})
      : device_(device), captured_(std::move(captured)) {}
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;

  /// Makes an operation known from before it is handed over, and forgets it if that fails.
  class Watched {
   public:
    /// `operation` is a literal.
    Watched(InFlight& owner, std::string_view operation, const std::vector<Transfer>& group);
    ~Watched();
    Watched(const Watched&) = delete;
    Watched& operator=(const Watched&) = delete;
    /// It is on the current stream, whole.
    void queued();

   private:
    InFlight& owner_;
    bool queued_ = false;
  };

  /// "gather of 'a' and 2 more (number 57)", if that has been the next one to finish for longer than `limit`; else
  /// empty. Forgets what is done. Does not wait.
  std::string overdue(std::chrono::milliseconds limit);
  /// The next one to finish, or empty.
  std::string first();
  /// Whether everything is done. Does not wait.
  bool idle();
  std::vector<Operation> history() const { return history_.operations(); }

 private:
  struct Entry {
    Operation operation;
    std::chrono::steady_clock::time_point since;
    Event done;
    bool queued = false;  // else a thread is still handing it over, perhaps waiting for a peer

    /// Put together only for a message: this is made for every operation of every step.
    std::string what() const {
      if (operation.first.empty()) return std::string(operation.kind);
      const std::string others = operation.others > 0 ? c10::str(" and ", operation.others, " more") : "";
      return c10::str(operation.kind, " of '", operation.first, "'", others, " (number ", operation.number, ")");
    }
  };

  void forget_done();  // with the mutex

  Device device_;
  std::function<bool(const Stream&)> captured_;
  std::mutex mutex_;
  std::deque<Entry> entries_;
  History history_;
  std::vector<Event> spare_events_;
};

}  // namespace ldc

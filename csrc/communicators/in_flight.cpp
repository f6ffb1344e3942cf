#include "communicators/in_flight.h"

namespace ldc {

InFlight::Watched::Watched(InFlight& owner, std::string_view operation, const std::vector<Transfer>& group)
    : owner_(owner) {
  const std::lock_guard lock(owner_.mutex_);
  Entry& entry = owner_.entries_.emplace_back();
  entry.operation = owner_.history_.begin(operation, group);
  entry.since = std::chrono::steady_clock::now();
  if (owner_.spare_events_.empty()) return;
  entry.done = std::move(owner_.spare_events_.back());
  owner_.spare_events_.pop_back();
}

InFlight::Watched::~Watched() {
  const std::lock_guard lock(owner_.mutex_);
  if (queued_ || owner_.entries_.empty()) return;
  owner_.history_.forget(owner_.entries_.back().operation.number);
  owner_.entries_.pop_back();
}

void InFlight::Watched::queued() {
  const Stream stream = current_stream(owner_.device_);
  if (owner_.captured_ && owner_.captured_(stream)) return;  // and is forgotten
  const std::lock_guard lock(owner_.mutex_);
  Entry& entry = owner_.entries_.back();  // one thread at a time hands over
  entry.done.record(stream);
  entry.queued = queued_ = true;
}

void InFlight::forget_done() {
  const auto now = std::chrono::steady_clock::now();
  while (!entries_.empty() && entries_.front().queued && entries_.front().done.reached()) {
    history_.finish(entries_.front().operation.number);
    spare_events_.push_back(std::move(entries_.front().done));
    entries_.pop_front();
    // The host runs ahead of the device: an operation's time starts when the one before it is done.
    if (!entries_.empty()) entries_.front().since = now;
  }
}

std::string InFlight::overdue(std::chrono::milliseconds limit) {
  const std::lock_guard lock(mutex_);
  forget_done();
  if (entries_.empty() || std::chrono::steady_clock::now() - entries_.front().since <= limit) return {};
  return entries_.front().what();
}

std::string InFlight::first() {
  const std::lock_guard lock(mutex_);
  return entries_.empty() ? std::string() : entries_.front().what();
}

bool InFlight::idle() {
  const std::lock_guard lock(mutex_);
  forget_done();
  return entries_.empty();
}

}  // namespace ldc

#include "communicators/history.h"

#include <algorithm>
#include <chrono>

namespace ldc {

namespace {

int64_t now() {
  return std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

Operation History::begin(std::string_view kind, const std::vector<Transfer>& group) {
  Operation operation{.kind = kind, .created = now()};
  for (const Transfer& transfer : group) {
    if (operation.first.empty()) operation.first = transfer.name;
    if (transfer.in.defined()) operation.sent += static_cast<int64_t>(transfer.in.nbytes());
    if (transfer.out.defined()) operation.received += static_cast<int64_t>(transfer.out.nbytes());
  }
  operation.others = group.size() - std::min<size_t>(group.size(), 1);
  const std::lock_guard lock(mutex_);
  operation.number = ++issued_;
  operations_.push_back(operation);
  if (operations_.size() > kKept) operations_.pop_front();
  return operation;
}

void History::finish(int64_t number) {
  const std::lock_guard lock(mutex_);
  const auto own = std::lower_bound(operations_.begin(), operations_.end(), number,
                                    [](const Operation& one, int64_t wanted) { return one.number < wanted; });
  if (own != operations_.end() && own->number == number) own->finished = now();
}

void History::forget(int64_t number) {
  const std::lock_guard lock(mutex_);
  if (!operations_.empty() && operations_.back().number == number) operations_.pop_back();
}

std::vector<Operation> History::operations() const {
  const std::lock_guard lock(mutex_);
  return {operations_.begin(), operations_.end()};
}

}  // namespace ldc

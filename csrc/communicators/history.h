// The last operations of a communicator, for messages after a failure.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "communicators/communicator.h"

namespace ldc {

/// The last operations of one list, in the order in which they were handed over. Any thread may ask.
class History {
 public:
  static constexpr size_t kKept = 2000;  // as many as torch's flight recorder keeps

  /// An operation is launched. `kind` is a literal.
  Operation begin(std::string_view kind, const std::vector<Transfer>& group);
  /// The operation was seen to be done.
  void finish(int64_t number);
  /// The operation was not launched after all.
  void forget(int64_t number);

  std::vector<Operation> operations() const;

 private:
  mutable std::mutex mutex_;
  std::deque<Operation> operations_;
  int64_t issued_ = 0;
};

}  // namespace ldc

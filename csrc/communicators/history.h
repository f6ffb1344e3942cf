// What a communicator did last, for whoever asks after a failure.
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

  /// An operation is handed over. `kind` is a literal.
  Operation begin(std::string_view kind, const std::vector<Transfer>& group);
  /// It is seen to be done.
  void finish(int64_t number);
  /// It was not handed over after all.
  void forget(int64_t number);

  std::vector<Operation> operations() const;

 private:
  mutable std::mutex mutex_;
  std::deque<Operation> operations_;
  int64_t issued_ = 0;
};

}  // namespace ldc

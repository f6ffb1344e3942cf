// Names for profilers: torch.profiler, and NVTX where torch.autograd.profiler.emit_nvtx is on.
#pragma once

#include <ATen/record_function.h>

#include <optional>
#include <string>

namespace ldc {

/// Names the work of this thread while the object lives. Without a profiler the name is not computed.
class Range {
 public:
  template <typename Name>
  explicit Range(const Name& name) {
    if (!at::hasCallbacks()) return;
    record_.emplace(at::RecordScope::USER_SCOPE);
    if (!record_->isActive()) return;
    name_ = name();
    record_->before(name_);
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  std::string name_;
  std::optional<at::RecordFunction> record_;
};

/// Hides the work of this thread from profilers while the object lives. torch.distributed's record of an operation ends on
/// the thread that finishes it, and writes into the profile even where that was taken, and freed, in the meantime. Gathers
/// and questions between hosts cross the steps at which profilers stop.
using Unrecorded = at::DisableRecordFunctionGuard;

}  // namespace ldc

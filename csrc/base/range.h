// Names for profilers: torch.profiler, and NVTX where torch.autograd.profiler.emit_nvtx is on.
#pragma once

#include <ATen/record_function.h>

#include <optional>
#include <string>

namespace ldc {

/// What this thread does as long as it lives. Without a profiler nobody is asked for the name.
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

}  // namespace ldc

// Functions of libraries that the extension is not linked to: it loads where there are none of them.
#pragma once

#include <atomic>

namespace ldc {

/// The address of a function of CUDA's runtime or of NCCL: in the library that torch has loaded, else in the one that
/// the system finds; null if there is none.
void* find_late(const char* name) noexcept;

/// As above; throws if there is none.
void* need_late(const char* name);

/// A function that is looked up when it is first called. One that has the function's own name, in this namespace, stands
/// for it in all calls from here.
template <typename Function>
class Late;

template <typename Result, typename... Arguments>
class Late<Result(Arguments...)> {
 public:
  constexpr explicit Late(const char* name) : name_(name) {}

  Result operator()(Arguments... arguments) {
    void* function = found_.load(std::memory_order_relaxed);
    if (function == nullptr) {
      function = need_late(name_);
      found_.store(function, std::memory_order_relaxed);
    }
    return reinterpret_cast<Result (*)(Arguments...)>(function)(arguments...);
  }

  bool exists() const noexcept { return find_late(name_) != nullptr; }

 private:
  const char* const name_;
  std::atomic<void*> found_ = nullptr;
};

}  // namespace ldc

#define LDC_LATE(name) inline constinit ::ldc::Late<decltype(::name)> name{#name};

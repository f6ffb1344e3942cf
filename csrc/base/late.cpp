#include "base/late.h"

#include <dlfcn.h>

#include <string_view>

#include "base/common.h"

namespace ldc {

void* find_late(const char* name) noexcept {
  // The names of both libraries, by the major version that changes what their functions take. Torch has loaded one.
  static constexpr const char* kNccl[] = {"libnccl.so.2"};
  static constexpr const char* kCuda[] = {"libcudart.so.13", "libcudart.so.12"};
  // What stands in for a function (LD_PRELOAD), or is linked into torch itself, comes first.
  if (void* function = dlsym(RTLD_DEFAULT, name)) return function;
  const auto find = [name](const auto& libraries) -> void* {
    for (const int flags : {RTLD_LAZY | RTLD_NOLOAD, RTLD_LAZY}) {
      for (const char* library : libraries) {
        if (void* handle = dlopen(library, flags)) {
          if (void* function = dlsym(handle, name)) return function;
        }
      }
    }
    return nullptr;
  };
  return std::string_view(name).starts_with("nccl") ? find(kNccl) : find(kCuda);
}

void* need_late(const char* name) {
  void* function = find_late(name);
  LDC_CHECK(function != nullptr, "no library that is loaded or found has ", name,
            ". It comes with a PyTorch for CUDA, or with a newer NCCL.");
  return function;
}

}  // namespace ldc

#include "base/build_info.h"

#include <torch/headeronly/version.h>

#include "ldc_build_config.h"  // written by setup.py: LDC_BUILD_REASON, LDC_NCCL_VERSION

namespace ldc {

const std::map<std::string, std::string>& build_info() {
  static const std::map<std::string, std::string> info = {
#ifdef LDC_WITH_NCCL
      {"mode", "cuda"},
#else
      {"mode", "cpu"},
#endif
      {"reason", LDC_BUILD_REASON},
      {"nccl", LDC_NCCL_VERSION},
      {"compiler", "C++ " __VERSION__},
      {"torch", TORCH_VERSION},
  };
  return info;
}

}  // namespace ldc

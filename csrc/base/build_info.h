// How this extension was built. Bug reports and error messages quote it.
#pragma once

#include <map>
#include <string>

namespace ldc {

/// Keys: mode ("cuda": for CUDA and CPUs, or "cpu"), reason (why this mode), nccl (header version, or "none"), compiler, torch.
const std::map<std::string, std::string>& build_info();

}  // namespace ldc

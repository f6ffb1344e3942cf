// Return codes and functions of CUDA's driver, for the files that include CUDA headers.
#pragma once

#include <cuda.h>

#include "base/common.h"
#include "base/cuda_runtime.h"

namespace ldc {

inline void check_cuda(cudaError_t result, const char* call) {
  if (result == cudaSuccess) return;
  cudaGetLastError();  // else torch would find it after its next kernel
  LDC_CHECK(false, call, ": ", cudaGetErrorString(result));
}

/// A function of the driver, which the extension is not linked to. `version`: of CUDA, in which it has this signature.
template <typename Function>
Function driver_function(const char* name, unsigned int version) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check_cuda(cudaGetDriverEntryPointByVersion(name, &address, version, cudaEnableDefault, &found),
             "cudaGetDriverEntryPointByVersion");
  LDC_CHECK(found == cudaDriverEntryPointSuccess && address != nullptr, "the driver has no ", name);
  return reinterpret_cast<Function>(address);
}

}  // namespace ldc

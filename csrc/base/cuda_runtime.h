// CUDA's runtime, for the files that include CUDA headers: its functions are looked up when they are called.
#pragma once

#include <cuda_runtime_api.h>

#include "base/late.h"

namespace ldc {

LDC_LATE(cudaFree)
LDC_LATE(cudaGetDriverEntryPointByVersion)
LDC_LATE(cudaGetErrorString)
LDC_LATE(cudaGetLastError)
LDC_LATE(cudaStreamIsCapturing)
LDC_LATE(cudaThreadExchangeStreamCaptureMode)

}  // namespace ldc

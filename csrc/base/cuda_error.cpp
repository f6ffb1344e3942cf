#include "base/cuda_error.h"

#include <cuda_runtime_api.h>

namespace ldc {

void forget_cuda_error() { cudaGetLastError(); }

}  // namespace ldc

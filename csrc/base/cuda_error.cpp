#include "base/cuda_error.h"

#include "base/cuda_runtime.h"

namespace ldc {

void forget_cuda_error() { cudaGetLastError(); }

}  // namespace ldc

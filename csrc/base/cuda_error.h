// The error that CUDA keeps for each thread.
// Compiled only with -DLDC_WITH_NCCL; CUDA headers stay in cuda_error.cpp.
#pragma once

namespace ldc {

/// Clears what the last failed call of this thread left behind.
void forget_cuda_error();

}  // namespace ldc

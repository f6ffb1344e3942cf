// GradientMerge on CUDA: bfloat16 into float32 on few multiprocessors.
// Compiled only with -DLDC_WITH_NCCL; CUDA headers stay in cuda_gradient_merge.cpp.
#pragma once

#include "executors/gradient_merge.h"

namespace ldc {

/// torch's kernels take the whole device for what memory bandwidth alone decides: for as long, no block of a matmul is
/// started (measured on 2 H200s: 0.3 of the 2.2 ms that a layer of an 8B model takes in backward). With few thread
/// blocks a merge takes somewhat longer, beside compute that goes on.
std::unique_ptr<GradientMerge> make_cuda_gradient_merge(Device device, int64_t blocks);

}  // namespace ldc

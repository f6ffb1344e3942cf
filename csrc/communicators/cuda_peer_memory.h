// PeerMemory on CUDA: device memory by IPC handles, barriers by stream memory operations. No kernels, no multicast.
// Compiled only with -DLDC_WITH_NCCL; CUDA headers stay in cuda_peer_memory.cpp.
#pragma once

#include <memory>

#include "communicators/peer_memory.h"

namespace ldc {

/// For one rank of `world_size` processes, which must be on one host and see the same /dev/shm; connect() says if not.
std::shared_ptr<PeerMemory> make_cuda_peer_memory(int64_t rank, int64_t world_size, Device device);

}  // namespace ldc

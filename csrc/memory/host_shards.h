// Parameter shards that live in host memory for good: pinned, and mapped into the device's address space.
//
// A shard is a tensor of the device: kernels read and write it through the link, in the order of their stream. So code
// outside of a step (state dicts, averages, hooks, any optimizer) sees correct values and needs no change. Operations on
// all shards in every step are faster by copies of host_of(): gathers (GatherEngine::fetch_shards), and optimizers that
// step chunk by chunk (StateCopies).
// On a device without streams both are the same ordinary memory.
#pragma once

#include "memory/host_slabs.h"

namespace ldc {

/// A 1-D tensor of `device` that lies in `slabs`, which it keeps like any other tensor there; uninitialised.
Tensor place_host_shard(HostSlabs& slabs, int64_t numel, ScalarType dtype, Device device);

/// The memory of such a tensor, or of a contiguous view of one, as a host tensor; undefined for any other tensor.
Tensor host_of(const Tensor& tensor);

}  // namespace ldc

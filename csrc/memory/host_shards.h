// Parameter shards that live in host memory for good: pinned, and mapped into the device's address space.
//
// A shard is a tensor of the device: kernels read and write it through the link, in the order of their stream, so
// whatever touches a parameter outside of a step (state dicts, averages, hooks, an optimizer of any kind) sees right
// values and needs to know nothing. What is done with all of them in every step takes the faster way, by copies of
// host_of(): gathers (GatherEngine::fetch_shards) and optimizers that step chunk by chunk (StateCopies).
// On a device without streams both are the same ordinary memory.
#pragma once

#include "memory/host_slabs.h"

namespace ldc {

class HostShards {
 public:
  HostShards(Device device, std::shared_ptr<HostMemory> memory)
      : device_(device), slabs_(std::move(memory), "parameter shards") {}

  /// A 1-D tensor of the device that lies in host memory; uninitialised.
  Tensor place(int64_t numel, ScalarType dtype);

  /// The memory of such a tensor, or of a contiguous view of one, as a host tensor; undefined for any other tensor.
  static Tensor host_of(const Tensor& tensor);

  int64_t bytes() const { return slabs_.bytes(); }
  /// Frees what no tensor lies in. The device must be done with it.
  void trim() { slabs_.trim(); }

 private:
  /// What the memory of a placed tensor belongs to.
  struct Owner {
    Tensor host;
  };
  static void end(void* owner) { delete static_cast<Owner*>(owner); }

  const Device device_;
  HostSlabs slabs_;
};

}  // namespace ldc

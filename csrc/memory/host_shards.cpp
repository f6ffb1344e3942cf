#include "memory/host_shards.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "memory/views.h"

namespace ldc {

Tensor HostShards::place(int64_t numel, ScalarType dtype) {
  LDC_CHECK_ARG(numel >= 0, "host_shard: `numel` must not be negative, got ", numel, ".");
  const PlainTensors plain;
  const auto options = at::TensorOptions().dtype(dtype);
  auto owner = std::make_unique<Owner>(slabs_.place(at::empty({numel}, options.device(c10::kMeta))));
  void* address = owner->host.mutable_data_ptr();
  // Pinned memory has the same address on the device (unified addressing, as on every 64-bit platform of CUDA's).
  return at::for_blob(address, {numel})
      .context(owner.release(), &HostShards::end)
      .target_device(device_)
      .options(options.device(device_))
      .make_tensor();
}

Tensor HostShards::host_of(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || !tensor.is_contiguous()) return {};
  const Owner* owner = tensor.storage().data_ptr().cast_context<Owner>(&HostShards::end);
  if (owner == nullptr) return {};
  const int64_t start = tensor.storage_offset() * tensor.element_size();
  return typed_view(owner->host, start, tensor.sizes(), tensor.scalar_type());
}

}  // namespace ldc

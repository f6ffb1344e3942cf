#include "memory/host_shards.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "memory/views.h"

namespace ldc {
namespace {

/// What the memory of a placed tensor belongs to.
struct Owner {
  Tensor host;
};

void end(void* owner) { delete static_cast<Owner*>(owner); }

}  // namespace

Tensor place_host_shard(HostSlabs& slabs, int64_t numel, ScalarType dtype, Device device) {
  LDC_CHECK_ARG(numel >= 0, "host_shard: `numel` must not be negative, got ", numel, ".");
  const PlainTensors plain;
  const auto options = at::TensorOptions().dtype(dtype);
  auto owner = std::make_unique<Owner>(slabs.place(at::empty({numel}, options.device(c10::kMeta))));
  void* address = owner->host.mutable_data_ptr();
  // Pinned memory has the same address on the device (unified addressing, as on every 64-bit platform of CUDA's).
  return at::for_blob(address, {numel})
      .context(owner.release(), &end)
      .target_device(device)
      .options(options.device(device))
      .make_tensor();
}

Tensor host_of(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || !tensor.is_contiguous()) return {};
  const Owner* owner = tensor.storage().data_ptr().cast_context<Owner>(&end);
  if (owner == nullptr) return {};
  const int64_t start = tensor.storage_offset() * tensor.element_size();
  return typed_view(owner->host, start, tensor.sizes(), tensor.scalar_type());
}

}  // namespace ldc

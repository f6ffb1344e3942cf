#include "host_slabs.h"

#pragma GCC diagnostic push
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Winterference-size"  // in torch's own templates
#endif
#include <ATen/core/CachingHostAllocator.h>
#pragma GCC diagnostic pop
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <bit>
#include <cstddef>

namespace ldc {
namespace {

constexpr int64_t kSmallestSlab = int64_t{1} << 20;
constexpr int64_t kLargestSlab = int64_t{1} << 30;

int64_t power_of_two(int64_t bytes) { return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes))); }

}  // namespace

Tensor HostSlabs::place(const Tensor& like) {
  LDC_CHECK_ARG(like.is_contiguous(), what_, ": a tensor of strides ", like.strides(), " has no place here; ",
                "it must be contiguous.");
  const PlainTensors plain;
  const int64_t need = align_up(std::max<int64_t>(static_cast<int64_t>(like.nbytes()), 1), kAlignment);
  Slab& slab = slab_for(need);
  auto* const address = static_cast<std::byte*>(slab.memory->mutable_data_ptr()) + slab.used;
  slab.used += need;
  return at::from_blob(address, like.sizes(), [memory = slab.memory](void*) {},
                       at::TensorOptions().dtype(like.scalar_type()));
}

HostSlabs::Slab& HostSlabs::slab_for(int64_t need) {
  for (Slab& slab : slabs_) {
    if (slab.used + need <= slab.memory->numel()) return slab;
  }
  const int64_t wanted = power_of_two(std::max(need, std::clamp(bytes() / 4, kSmallestSlab, kLargestSlab)));
  const auto too_much = [&](int64_t capacity) { return limit_ > 0 && bytes() + capacity > limit_; };
  int64_t capacity = wanted;
  if (too_much(capacity)) {
    capacity = power_of_two(need);
    TORCH_CHECK_WITH(OutOfMemoryError, !too_much(capacity), "lightning_deepcompile: no host memory for ", capacity,
                     " more bytes of offloaded ", what_, ": ", bytes(), " of at most ", limit_,
                     " bytes are in use. Raise `host_memory_budget`, or offload less.");
  }
  try {
    const auto options = at::TensorOptions().dtype(c10::kByte).pinned_memory(has_streams(device_));
    slabs_.push_back({std::make_shared<Tensor>(at::empty({capacity}, options))});
  } catch (const c10::Error& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "lightning_deepcompile: the host refused ", capacity, " bytes of ",
                     has_streams(device_) ? "pinned " : "", "memory for offloaded ", what_, ", with ", bytes(),
                     " held: ", message_of(error), ". Lower `host_memory_budget` or free host memory; look at the ",
                     "container's memory limit.");
  }
  return slabs_.back();
}

int64_t HostSlabs::bytes() const {
  int64_t total = 0;
  for (const Slab& slab : slabs_) total += slab.memory->numel();
  return total;
}

void HostSlabs::trim() {
  const size_t before = slabs_.size();
  std::erase_if(slabs_, [](const Slab& slab) { return slab.memory.use_count() == 1; });
  // torch's allocator keeps pinned memory for the next one who asks.
  if (has_streams(device_) && slabs_.size() < before) at::getHostAllocator(device_.type())->empty_cache();
}

}  // namespace ldc

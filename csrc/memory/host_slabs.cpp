#include "memory/host_slabs.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstddef>

namespace ldc {
namespace {

constexpr int64_t kSmallestSlab = int64_t{1} << 20;
constexpr int64_t kLargestSlab = int64_t{1} << 30;

}  // namespace

Tensor HostSlabs::place(const Tensor& like) {
  LDC_CHECK_ARG(like.is_contiguous(), what_, ": a tensor of strides ", like.strides(), " has no place here; ",
                "it must be contiguous.");
  const PlainTensors plain;
  const int64_t need = align_up(std::max<int64_t>(static_cast<int64_t>(like.nbytes()), 1), kAlignment);
  Slab& slab = slab_for(need);
  auto* const address = static_cast<std::byte*>(slab.memory->data()) + slab.used;
  slab.used += need;
  return at::from_blob(address, like.sizes(), [memory = slab.memory](void*) {},
                       at::TensorOptions().dtype(like.scalar_type()));
}

HostSlabs::Slab& HostSlabs::slab_for(int64_t need) {
  for (Slab& slab : slabs_) {
    if (slab.used + need <= slab.memory->bytes()) return slab;
  }
  int64_t capacity = HostMemory::round_up(std::max(need, std::clamp(bytes() / 4, kSmallestSlab, kLargestSlab)));
  if (!memory_->can_allow(capacity)) capacity = HostMemory::round_up(need);
  slabs_.push_back({memory_->take(capacity, c10::str("offloaded ", what_))});
  return slabs_.back();
}

void HostSlabs::reserve(const std::vector<int64_t>& sizes) {
  reserved_ = 0;
  std::vector<int64_t> used;
  for (const Slab& slab : slabs_) used.push_back(slab.used);
  const auto empty_again = [&] {
    used.resize(slabs_.size(), 0);
    for (size_t i = 0; i < slabs_.size(); ++i) slabs_[i].used = used[i];
  };
  try {
    for (const int64_t size : sizes) {
      const int64_t need = align_up(std::max<int64_t>(size, 1), kAlignment);
      slab_for(need).used += need;
    }
  } catch (...) {
    empty_again();
    throw;
  }
  empty_again();
  if (!sizes.empty()) reserved_ = bytes();
}

int64_t HostSlabs::bytes() const {
  int64_t total = 0;
  for (const Slab& slab : slabs_) total += slab.memory->bytes();
  return total;
}

void HostSlabs::free_unused() {
  const int64_t before = bytes();
  int64_t left = before;
  std::erase_if(slabs_, [&](Slab& slab) {
    if (slab.memory.use_count() > 1) return false;
    slab.used = 0;
    if (left - slab.memory->bytes() < reserved_) return false;
    left -= slab.memory->bytes();
    return true;
  });
  if (left == before) return;
  memory_->free_cached();
}

}  // namespace ldc

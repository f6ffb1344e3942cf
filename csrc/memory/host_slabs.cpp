#include "memory/host_slabs.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstddef>
#include <iterator>

namespace ldc {
namespace {

constexpr int64_t kSmallestSlab = int64_t{1} << 20;
constexpr int64_t kLargestSlab = int64_t{1} << 30;

int64_t aligned(int64_t bytes) { return align_up(std::max<int64_t>(bytes, 1), kAlignment); }

}  // namespace

int64_t HostSlabs::Gaps::take(int64_t need) {
  const auto gap = std::find_if(ranges_.begin(), ranges_.end(), [&](const auto& range) { return range.second >= need; });
  if (gap == ranges_.end()) return -1;
  const auto [begin, bytes] = *gap;
  if (bytes > need) ranges_.emplace_hint(std::next(gap), begin + need, bytes - need);
  ranges_.erase(gap);
  return begin;
}

void HostSlabs::Gaps::give(int64_t begin, int64_t bytes) {
  auto next = ranges_.lower_bound(begin);
  if (next != ranges_.end() && begin + bytes == next->first) {
    bytes += next->second;
    next = ranges_.erase(next);
  }
  if (next != ranges_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == begin) {
      before->second += bytes;
      return;
    }
  }
  ranges_.emplace_hint(next, begin, bytes);
}

Tensor HostSlabs::place(const Tensor& like) {
  LDC_CHECK_ARG(like.is_contiguous(), what_, ": a tensor of strides ", like.strides(), " has no place here; ",
                "it must be contiguous.");
  const PlainTensors plain;
  const std::shared_ptr<Part> part = take(aligned(static_cast<int64_t>(like.nbytes())));
  auto* const address = static_cast<std::byte*>(part->memory->data()) + part->begin;
  Tensor placed = at::from_blob(address, like.sizes(), [part](void*) {}, at::TensorOptions().dtype(like.scalar_type()));
  part->placed = true;
  return placed;
}

std::shared_ptr<HostSlabs::Part> HostSlabs::take(int64_t need) {
  if (auto part = take_from_gaps(need)) return part;
  const bool any_gone = std::any_of(slabs_.begin(), slabs_.end(), [](const Slab& slab) {
    return std::any_of(slab.parts.begin(), slab.parts.end(), &has_gone);
  });
  if (any_gone) {
    wait_for_copies_();
    reclaim(/*copies_are_done=*/true);
    if (auto part = take_from_gaps(need)) return part;
  }
  int64_t capacity = HostMemory::round_up(std::max(need, std::clamp(bytes() / 4, kSmallestSlab, kLargestSlab)));
  if (!memory_->can_allow(capacity)) capacity = HostMemory::round_up(need);
  std::shared_ptr<const HostMemory::Block> block = memory_->take(capacity, c10::str("offloaded ", what_));
  slabs_.push_back({std::move(block), Gaps(capacity), {}});
  return take_from_gaps(need);
}

std::shared_ptr<HostSlabs::Part> HostSlabs::take_from_gaps(int64_t need) {
  for (Slab& slab : slabs_) {
    const int64_t begin = slab.gaps.take(need);
    if (begin < 0) continue;
    slab.parts.push_back(std::make_shared<Part>(Part{.memory = slab.memory, .begin = begin, .bytes = need}));
    return slab.parts.back();
  }
  return nullptr;
}

void HostSlabs::reclaim(bool copies_are_done) {
  for (Slab& slab : slabs_) {
    std::erase_if(slab.parts, [&](const std::shared_ptr<Part>& part) {
      if (!has_gone(part) || (part->placed && !copies_are_done)) return false;
      slab.gaps.give(part->begin, part->bytes);
      return true;
    });
  }
}

void HostSlabs::reserve(const std::vector<int64_t>& sizes) {
  reserved_ = 0;
  std::vector<std::shared_ptr<Part>> parts;  // which stand for tensors
  const auto put_back = [&] {
    parts.clear();
    reclaim(/*copies_are_done=*/false);
  };
  try {
    for (const int64_t size : sizes) parts.push_back(take(aligned(size)));
  } catch (...) {
    put_back();
    throw;
  }
  put_back();
  if (!sizes.empty()) reserved_ = bytes();
}

int64_t HostSlabs::bytes() const {
  int64_t total = 0;
  for (const Slab& slab : slabs_) total += slab.memory->bytes();
  return total;
}

void HostSlabs::free_unused() {
  reclaim(/*copies_are_done=*/true);
  const int64_t before = bytes();
  int64_t left = before;
  std::erase_if(slabs_, [&](const Slab& slab) {
    if (!slab.parts.empty() || left - slab.memory->bytes() < reserved_) return false;
    left -= slab.memory->bytes();
    return true;
  });
  if (left == before) return;
  memory_->free_cached();
}

}  // namespace ldc

#include "communicators/packing.h"

#include <ATen/ops/split_with_sizes_copy.h>

#include <algorithm>
#include <numeric>

#include "memory/views.h"

namespace ldc {

namespace {

constexpr int64_t kElements = 128;  // to a multiple of which shards of a block are apart (sharding/layout.py)

Tensor as(ScalarType dtype, const Tensor& tensor) { return dtype == c10::kByte ? as_bytes(tensor) : flat(tensor); }

}  // namespace

std::vector<Packing> Packing::of(Kind kind, const std::vector<Transfer>& group, int64_t world_size, int64_t limit) {
  std::vector<Packing> packings;
  if (limit == 0 || world_size == 1) return packings;
  for (size_t i = 0; i < group.size(); ++i) {
    const Tensor& part = kind == Kind::gather ? group[i].in : group[i].out;
    if (part.numel() == 0 || static_cast<int64_t>(part.nbytes()) > limit) continue;
    const ScalarType dtype = kind == Kind::gather ? c10::kByte : part.scalar_type();
    auto own = std::find_if(packings.begin(), packings.end(), [&](const Packing& p) { return p.dtype_ == dtype; });
    if (own == packings.end()) own = packings.insert(own, Packing(kind, dtype, world_size));
    const int64_t elements = align_up(part.numel(), kElements);
    const int64_t bytes_each = kind == Kind::gather ? part.element_size() : 1;
    own->positions_.push_back(i);
    own->sizes_.push_back(part.numel() * bytes_each);
    own->sizes_.push_back((elements - part.numel()) * bytes_each);
    own->part_ += elements * bytes_each;
  }
  std::erase_if(packings, [](const Packing& packing) { return packing.positions_.size() < 2; });
  for (Packing& packing : packings) {
    for (const size_t position : packing.positions_) packing.members_.push_back(group[position]);
  }
  return packings;
}

int64_t Packing::bytes() const {
  // The part, the whole, and what gaps of all ranks are unpacked to: a gap is shorter than kElements elements of a dtype
  // of 16 bytes at most.
  const int64_t item = item_size(dtype_);
  return align_up(part_ * item, kAlignment) + part_ * item * world_size_ + kElements * 16 * world_size_;
}

Tensor Packing::part_of(const Transfer& transfer) const {
  return as(dtype_, kind_ == Kind::gather ? transfer.in : transfer.out);
}

Tensor Packing::whole_of(const Transfer& transfer) const {
  return as(dtype_, kind_ == Kind::gather ? transfer.out : transfer.in).view({world_size_, -1});
}

Tensor Packing::in_place() const {
  const Tensor first = part_of(members_[0]);
  int64_t at = first.storage_offset();
  for (size_t i = 0; i < members_.size(); ++i) {
    const Tensor part = part_of(members_[i]);
    if (!part.storage().is_alias_of(first.storage()) || part.storage_offset() != at) return {};
    at += sizes_[2 * i] + sizes_[2 * i + 1];
  }
  if (static_cast<size_t>(at * item_size(dtype_)) > first.storage().nbytes()) return {};
  return typed_view(first, first.storage_offset() * item_size(dtype_), {part_}, dtype_);
}

void Packing::pack(std::vector<Transfer>& group, const Tensor& buffer) {
  const int64_t item = item_size(dtype_);
  const int64_t begin = buffer.storage_offset();
  const int64_t behind = begin + align_up(part_ * item, kAlignment);
  Tensor part = typed_view(buffer, begin, {part_}, dtype_);
  const Tensor whole = typed_view(buffer, behind, {world_size_, part_}, dtype_);
  scratch_ = typed_view(buffer, behind + part_ * item * world_size_, {kElements * 16 / item * world_size_}, dtype_);

  const bool gathers = kind_ == Kind::gather;
  const Tensor there = gathers ? in_place() : Tensor();
  if (there.defined()) part = there;
  std::vector<Copy> copies;
  for (size_t i = 0; i < members_.size() && !there.defined(); ++i) {
    const int64_t start = std::accumulate(sizes_.begin(), sizes_.begin() + 2 * i, int64_t{0});
    if (gathers) {
      copies.push_back({part.narrow(0, start, sizes_[2 * i]), part_of(members_[i])});
    } else {
      whole.narrow(1, start, sizes_[2 * i]).copy_(whole_of(members_[i]));
    }
  }
  copy_all(copies);
  arrived_ = gathers ? whole : part.view({1, part_});
  // What is empty travels nowhere, and still has its name in messages.
  const Tensor none = part.narrow(0, 0, 0);
  for (const size_t position : positions_) group[position].in = group[position].out = none;
  group.push_back(gathers ? Transfer{flat(whole), part, "packed"} : Transfer{part, flat(whole), "packed"});
}

void Packing::unpack() const {
  const PlainTensors plain;
  std::vector<Tensor> outs;
  std::vector<int64_t> sizes;
  for (size_t i = 0; i < members_.size(); ++i) {
    outs.push_back(kind_ == Kind::gather ? whole_of(members_[i]) : part_of(members_[i]).view({1, -1}));
    sizes.push_back(sizes_[2 * i]);
    const int64_t gap = sizes_[2 * i + 1];
    if (gap == 0) continue;
    outs.push_back(scratch_.narrow(0, 0, gap * arrived_.size(0)).view({arrived_.size(0), gap}));
    sizes.push_back(gap);
  }
  // One kernel for all of them: the one that FSDP2 uses.
  at::split_with_sizes_copy_out(outs, arrived_, sizes, 1);
}

}  // namespace ldc

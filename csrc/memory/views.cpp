#include "memory/views.h"

#include <ATen/ops/_foreach_copy.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <numeric>
#include <tuple>

namespace ldc {

void reallocate(const c10::Storage& storage, size_t bytes, Device device) {
  const c10::DeviceGuard guard(device);  // allocators use the current device
  storage.set_data_ptr_noswap(storage.allocator()->allocate(bytes));
  storage.set_nbytes(bytes);
}

Tensor typed_view(const Tensor& base, int64_t byte_offset, c10::IntArrayRef sizes, ScalarType dtype) {
  const int64_t item = item_size(dtype);
  TORCH_INTERNAL_ASSERT(byte_offset % item == 0, "misaligned view: offset ", byte_offset, ", item size ", item);
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                       base.key_set(), c10::scalarTypeToTypeMeta(dtype));
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_storage_offset(byte_offset / item);
  impl->set_sizes_contiguous(sizes);
  return view;
}

Tensor flat(const Tensor& tensor) {
  return typed_view(tensor, tensor.storage_offset() * tensor.element_size(), {tensor.numel()}, tensor.scalar_type());
}

Tensor as_bytes(const Tensor& tensor) {
  const int64_t item = tensor.element_size();
  return typed_view(tensor, tensor.storage_offset() * item, {tensor.numel() * item}, c10::kByte);
}

Tensor with_own_storage(const Tensor& tensor) {
  const c10::Storage& memory = tensor.storage();
  c10::DataPtr data(memory.mutable_data(), new c10::Storage(memory),
                    [](void* kept) { delete static_cast<c10::Storage*>(kept); }, memory.device());
  auto apart = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), memory.nbytes(), std::move(data)), tensor.key_set(), tensor.dtype());
  apart.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  apart.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return apart;
}

void copy_all(const std::vector<Copy>& copies) {
  constexpr int64_t kLarge = 1 << 23;  // elements from which on a kernel of its own is faster than a shared one (H100)
  std::vector<Copy> joined;
  const auto follows = [](const Tensor& first, const Tensor& second) {
    return first.storage().is_alias_of(second.storage()) && first.scalar_type() == second.scalar_type() &&
           first.storage_offset() + first.numel() == second.storage_offset();
  };
  const auto with = [](const Tensor& first, const Tensor& second) {
    return typed_view(first, first.storage_offset() * first.element_size(), {first.numel() + second.numel()},
                      first.scalar_type());
  };
  for (const Copy& copy : copies) {
    if (copy.from.numel() == 0) continue;
    if (!joined.empty() && follows(joined.back().to, copy.to) && follows(joined.back().from, copy.from)) {
      joined.back() = {with(joined.back().to, copy.to), with(joined.back().from, copy.from)};
    } else {
      joined.push_back({flat(copy.to), flat(copy.from)});
    }
  }
  std::vector<Tensor> to, from;
  for (const Copy& copy : joined) {
    if (copy.from.numel() >= kLarge) {
      copy.to.copy_(copy.from);
    } else {
      to.push_back(copy.to);
      from.push_back(copy.from);
    }
  }
  if (!to.empty()) at::_foreach_copy_(to, from);
}

Tensor Run::over(const Tensor& member) const {
  return typed_view(member, begin * member.element_size(), {length}, member.scalar_type());
}

Tensor Run::in(const Tensor& buffer) const { return typed_view(buffer, start, {length}, kind.dtype); }

Tensor Run::in(const Tensor& buffer, const Tensor& member) const {
  const int64_t offset = (member.storage_offset() - begin) * item_size(kind.dtype);
  return typed_view(buffer, start + offset, member.sizes(), kind.dtype);
}

std::vector<Run> neighbour_runs(const std::vector<Tensor>& tensors, const std::vector<CopyKind>& kinds,
                                int64_t& end, const MayBridge& may_bridge) {
  constexpr int64_t kLargestGap = 512;
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto place = [&](size_t i) {
    return std::tuple(tensors[i].storage().unsafeGetStorageImpl(), tensors[i].scalar_type(),
                      tensors[i].storage_offset());
  };
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return place(a) < place(b); });

  std::vector<Run> runs;
  for (const size_t i : order) {
    const Tensor& tensor = tensors[i];
    const int64_t begin = tensor.storage_offset();
    if (!runs.empty()) {
      Run& run = runs.back();
      const size_t last = run.members.back();
      const int64_t gap = begin - (run.begin + run.length);
      const bool same_memory = tensors[last].storage().is_alias_of(tensor.storage()) &&
                               tensors[last].scalar_type() == tensor.scalar_type();
      if (same_memory && run.kind == kinds[i] && gap >= 0 && gap * tensor.element_size() <= kLargestGap &&
          (gap == 0 || !may_bridge || may_bridge(tensor.storage(), begin - gap, begin))) {
        run.members.push_back(i);
        run.length = begin + tensor.numel() - run.begin;
        continue;
      }
    }
    runs.push_back({.members = {i}, .kind = kinds[i], .begin = begin, .length = tensor.numel()});
  }
  for (Run& run : runs) run.start = append(end, run.length * item_size(run.kind.dtype));
  return runs;
}

}  // namespace ldc

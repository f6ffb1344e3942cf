// Views of raw memory: typed windows into arena slots, runs of neighbouring tensors seen as one flat tensor, and copies
// of these in a buffer.
#pragma once

#include <functional>
#include <utility>

#include "base/common.h"

namespace ldc {

inline int64_t item_size(ScalarType dtype) { return static_cast<int64_t>(c10::elementSize(dtype)); }

/// Room for `bytes` more in a buffer that is filled up to `end`; returns where it begins.
inline int64_t append(int64_t& end, int64_t bytes) { return std::exchange(end, end + align_up(bytes, kAlignment)); }

/// Gives a storage of the device other memory, of so many bytes; what it had goes back to its allocator.
void reallocate(const c10::Storage& storage, size_t bytes, Device device);

/// A contiguous tensor of `sizes` and `dtype` that starts `byte_offset` bytes into `base`'s storage. It shares the
/// storage and so keeps it alive. Built without the dispatcher: a block of ten parameters is gathered in one host call
/// and should not pay for thirty view operators.
Tensor typed_view(const Tensor& base, int64_t byte_offset, c10::IntArrayRef sizes, ScalarType dtype);

/// The memory of a contiguous tensor as a 1-D tensor of the same dtype.
Tensor flat(const Tensor& tensor);

/// The memory of a contiguous tensor as bytes.
Tensor as_bytes(const Tensor& tensor);

/// The same memory as a tensor with a storage of its own, which keeps the given tensor's alive. An operator that hands
/// out memory which its arguments lie in returns this: to the compiler, results never alias arguments.
Tensor with_own_storage(const Tensor& tensor);

/// A copy to be made, between contiguous tensors of as many elements; `to` may have another dtype.
struct Copy {
  Tensor to;
  Tensor from;
};

/// Queues copies on the current stream, in few kernels: tensors that follow one another without a gap on both sides are
/// one, and small ones share a kernel.
void copy_all(const std::vector<Copy>& copies);

/// The copy of a tensor in a buffer.
struct CopyKind {
  ScalarType dtype;
  bool add = false;  // it is to be added to the tensor
  bool operator==(const CopyKind&) const = default;
};

/// Tensors of one storage that lie (almost) next to each other, so that one kernel can copy them all to or from a
/// buffer, in which their copies lie as far apart as they do.
struct Run {
  std::vector<size_t> members;  // indices into the list that was given, by rising address
  CopyKind kind;                // of all members
  int64_t begin = 0;            // first element, counted in the storage
  int64_t length = 0;           // elements, including the gaps between members
  int64_t start = 0;            // of the copy in the buffer, in bytes

  /// The run as a flat tensor over the members' own storage.
  Tensor over(const Tensor& member) const;
  /// Its copy as a flat tensor.
  Tensor in(const Tensor& buffer) const;
  /// The copy of a member.
  Tensor in(const Tensor& buffer, const Tensor& member) const;
};

/// Groups contiguous tensors into runs. Members of a run share storage, dtype and kind, and are at most 512 bytes
/// apart. What lies in a gap is treated along with its neighbours: alignment padding, unless `may_bridge` (storage,
/// first and last element of the gap) says that something else lives there. Copies are appended to a buffer that is
/// filled up to `end`.
using MayBridge = std::function<bool(const c10::Storage&, int64_t, int64_t)>;
std::vector<Run> neighbour_runs(const std::vector<Tensor>& tensors, const std::vector<CopyKind>& kinds,
                                int64_t& end, const MayBridge& may_bridge = {});

}  // namespace ldc

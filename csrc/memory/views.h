// Views of raw memory: typed windows into arena slots, and runs of neighbouring tensors seen as one flat tensor.
#pragma once

#include <functional>

#include "base/common.h"

namespace ldc {

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

/// Tensors of one storage that lie (almost) next to each other, so that one kernel can treat them all.
struct Run {
  std::vector<size_t> members;  // indices into the list that was given, by rising address
  int64_t begin = 0;            // first element, counted in the storage
  int64_t length = 0;           // elements, including the gaps between members

  /// Where member `tensor` starts inside the run.
  int64_t offset_of(const Tensor& tensor) const { return tensor.storage_offset() - begin; }
  /// The run as a flat tensor over the members' own storage.
  Tensor over(const Tensor& member) const;
};

/// Groups contiguous tensors into runs. Members of a run share storage, dtype and `key`, and are at most 512 bytes
/// apart. What lies in a gap is treated along with its neighbours: alignment padding, unless `may_bridge` (storage,
/// first and last element of the gap) says that something else lives there.
using MayBridge = std::function<bool(const c10::Storage&, int64_t, int64_t)>;
std::vector<Run> neighbour_runs(const std::vector<Tensor>& tensors, const std::vector<int>& keys,
                                const MayBridge& may_bridge = {});

}  // namespace ldc

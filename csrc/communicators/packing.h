// Small tensors of a group, packed into one for the wire.
#pragma once

#include <vector>

#include "communicators/communicator.h"

namespace ldc {

/// Those tensors of a group of which a rank's part is small, packed rank-major: one part of every tensor after the other,
/// for one rank after the other. They are one operation on the wire, which costs its latency once, and a copy on either
/// side; with a thousand ranks each part is a few kilobytes, and latency is all that an operation takes. (FSDP2 and
/// DeepSpeed pack whole blocks, whatever their size.)
///
/// Where a part starts follows from sizes alone, so that all ranks pack alike. It is where it lies among the shards of a
/// block, which are a multiple of 128 elements apart: parts that lie so are sent from where they are.
class Packing {
 public:
  enum class Kind { gather, reduction };

  /// Of each dtype a packing of the tensors whose parts have at most `limit` bytes, if there are two or more. Gathers
  /// move bytes: they are packed whatever their dtypes.
  static std::vector<Packing> of(Kind kind, const std::vector<Transfer>& group, int64_t world_size, int64_t limit);

  /// Of memory that pack() and unpack() need.
  int64_t bytes() const;
  int64_t tensors() const { return static_cast<int64_t>(members_.size()); }

  /// Queues the copies to `buffer` on the current stream. The packed tensors of `group` become empty, which nothing
  /// carries, and what carries them is added.
  void pack(std::vector<Transfer>& group, const Tensor& buffer);
  /// Queues the copies from the buffer. To be called when the group is complete.
  void unpack() const;

 private:
  Packing(Kind kind, ScalarType dtype, int64_t world_size) : kind_(kind), dtype_(dtype), world_size_(world_size) {}

  Tensor part_of(const Transfer& transfer) const;
  Tensor whole_of(const Transfer& transfer) const;  // a row for each rank
  /// The part side of the packed tensors where they lie; undefined if they do not lie as they are packed.
  Tensor in_place() const;

  Kind kind_;
  ScalarType dtype_;  // in which the packed tensor travels
  int64_t world_size_;
  std::vector<size_t> positions_;  // in the group
  std::vector<int64_t> sizes_;     // of parts and, behind each, of the gap to the next one; in elements of `dtype_`
  int64_t part_ = 0;               // their sum
  std::vector<Transfer> members_;
  Tensor scratch_;  // where gaps are unpacked to
  Tensor arrived_;  // a row for each rank that a gather heard of; one row for a reduction
};

}  // namespace ldc

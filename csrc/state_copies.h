// Optimizer states that live in host memory and visit the device, chunk by chunk, while the optimizer steps.
//
// Three device buffers go round: one chunk arrives, one is stepped, one leaves. They exist from the first fetch of a
// step until release() or settle(), so that forward and backward passes have their memory.
//
// Order on the device, and what would break without it:
//   copy out (last step) → copy in   begin(): the home must hold what the last step left
//   home written → copy in           begin(): kernels write to shards that live in host memory (HostShards)
//   buffer allocated → copy in       its memory comes from the compute stream's pool, which may still be using it
//   copy in → stepped                arrive()
//   stepped → copy out               stow() orders the copy-out stream behind the compute stream
//   copy out → copy in               the slot's `left` event: the next chunk overwrites the buffer
//   copy out → freed                 settle(), or release(), which leaves that to the allocator; tensors that an
//                                    optimizer made itself are held until the slot is used again
//   copy out → read by the host      synchronize()
// On a device without streams every copy is finished when its call returns.
#pragma once

#include <array>

#include "host_slabs.h"
#include "stats.h"

namespace ldc {

class StateCopies {
 public:
  static constexpr int64_t kSlots = 3;

  StateCopies(Device device, Stats& stats, std::shared_ptr<HostMemory> memory);

  /// A place in host memory for a tensor like `like`; uninitialised.
  Tensor home(const Tensor& like) { return slabs_.place(like); }
  void reserve(const std::vector<int64_t>& sizes) { slabs_.reserve(sizes); }

  /// Starts a step whose chunks need at most `slot_bytes` (every tensor rounded up to kAlignment).
  void begin(int64_t slot_bytes);
  /// Starts copying to the device what lies at `homes`; returns the device tensors, to be used after arrive().
  std::vector<Tensor> fetch(int64_t slot, const std::vector<Tensor>& homes);
  /// From here on the current stream may use what fetch() returned.
  void arrive(int64_t slot);
  /// Starts copying to `homes`. The slot may be fetched into again at once.
  void stow(int64_t slot, const std::vector<Tensor>& sources, const std::vector<Tensor>& homes);
  /// Orders the current stream behind all copies and gives the buffers back.
  void settle();
  /// Gives the buffers back while copies out of them go on: torch's allocator hands their memory out when these are done.
  void release();
  /// Blocks the calling thread until the homes hold what was stowed; frees host memory that nobody uses.
  void synchronize();

  int64_t host_bytes() const { return slabs_.bytes(); }
  int64_t device_bytes() const;  // of buffers, and of tensors that leave

 private:
  struct Slot {
    Tensor memory;
    std::vector<Tensor> held;  // sources outside of `memory`
    Event arrived;
    Event left;
  };
  Slot& slot_at(int64_t slot);
  void release_held(Slot& slot);
  void note_device_bytes();

  Device device_;
  Stats& stats_;
  Stream out_, in_;
  HostSlabs slabs_;
  std::array<Slot, kSlots> slots_;
  int64_t slot_bytes_ = 0;
  Event scratch_;
};

}  // namespace ldc

// Optimizer states that live in host memory, in host buffers, and are on the device while the optimizer steps: chunk by
// chunk.
//
// Device buffers (slots) are used in turn: one chunk arrives, one is stepped, one leaves. They exist from the first
// fetch of a step until their chunk has left (settle_first), or until release() or settle(). Forward and backward passes
// use that memory otherwise. Chunks that fit beside the end of a backward pass are fetched there already (expect,
// advance), into slots of their own.
//
// Order on the device, and what would break without it:
//   copy out (last step) → copy in   begin(), and the slot's `left` event in advance(): the host buffer must hold
//                                    what was stowed
//   host buffer written → copy in    begin(): kernels write to shards that live in host memory (host_shards.h)
//   buffer allocated → copy in       its memory comes from the compute stream's pool, which may still be using it
//   copy in → stepped                wait()
//   stepped → copy out               stow() orders the copy-out stream behind the compute stream
//   copy out → copy in               the slot's `left` event: the next chunk overwrites the buffer
//   copy out → freed                 settle_first(), settle(), or release(), which leaves that to the allocator;
//                                    tensors that an optimizer made itself are held until the slot is used again
//   copy out → read by the host      synchronize()
// On a device without streams every copy is finished when its call returns.
#pragma once

#include <map>

#include "base/stats.h"
#include "memory/host_slabs.h"
#include "memory/retry.h"

namespace ldc {

class StateCopies {
 public:
  StateCopies(Device device, Stats& stats, std::shared_ptr<HostMemory> memory);

  /// A host tensor like `like`, in which a state waits between steps; uninitialised.
  Tensor host_buffer(const Tensor& like) { return slabs_.place(like); }
  void reserve(const std::vector<int64_t>& sizes) { slabs_.reserve(sizes); }

  /// Sets the chunks that advance() will fetch: host buffers that only stow() writes to, and the slots from which it did.
  /// Forgets chunks fetched before.
  void expect(std::vector<std::vector<Tensor>> chunks, std::vector<std::vector<int64_t>> slots);
  /// Starts fetching the next `count` of the chunks that are expected.
  void advance(int64_t count);
  /// What advance() has fetched: chunk k is in the slot -1 - k. The next advance() begins with the first chunk again.
  std::vector<std::vector<Tensor>> take();
  /// Forgets chunks that were fetched and not used; the next advance() begins with the first chunk again.
  void forget_fetched();

  /// Starts a step. Slots get `slot_bytes` at least (every tensor rounded up to kAlignment), so that most chunks fit any.
  void begin(int64_t slot_bytes);
  /// Starts copying host buffers to the device; returns the device tensors, to be used after wait().
  std::vector<Tensor> fetch(int64_t slot, const std::vector<Tensor>& host_buffers);
  /// From here on the current stream may use what fetch() returned.
  void wait(int64_t slot);
  /// Starts copying to host buffers. The slot may be fetched into again at once.
  void stow(int64_t slot, const std::vector<Tensor>& sources, const std::vector<Tensor>& host_buffers);
  /// Orders the current stream behind the copies out of the `count` slots that were stowed first, which are freed.
  void settle_first(int64_t count);
  /// Orders the current stream behind all copies and frees the slots.
  void settle();
  /// Frees the slots, but for what is expected, while copies out of them go on: torch's allocator hands their memory out
  /// when these are done.
  void release();
  /// Blocks the calling thread until the host buffers hold what was stowed; frees host memory that nobody uses.
  void synchronize();

  void retry_with(GiveBack give_back) { give_back_ = std::move(give_back); }
  int64_t host_bytes() const { return slabs_.bytes(); }
  int64_t device_bytes() const;  // of buffers, and of tensors that leave

 private:
  struct Slot {
    Tensor memory;
    std::vector<Tensor> held;  // sources outside of `memory`
    int64_t stowed = 0;  // the number of the stow() that filled it, counted from 1; 0: none did
    Event arrived;
    Event left;

    bool empty() const { return !memory.defined() && held.empty(); }
  };
  static int64_t ahead(size_t chunk) { return -1 - static_cast<int64_t>(chunk); }
  std::vector<Tensor> copy_in(Slot& target, const std::vector<Tensor>& host_buffers, int64_t bytes);
  void settle(Slot& slot);
  void release(Slot& slot);
  void release_held(Slot& slot);
  void wait_for_copies() const;  // of the host
  void note_device_bytes();

  Device device_;
  Stats& stats_;
  Stream out_, in_;
  GiveBack give_back_;
  HostSlabs slabs_;
  std::map<int64_t, Slot> slots_;
  int64_t slot_bytes_ = 0;
  int64_t stows_ = 0;
  std::vector<std::vector<Tensor>> expected_;
  std::vector<std::vector<int64_t>> expected_from_;  // slots, by chunk
  std::vector<std::vector<Tensor>> advanced_;  // and not taken
  Event scratch_;
};

}  // namespace ldc

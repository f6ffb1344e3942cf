// The arena: device memory for gathered parameters and for buffers that communication needs, at stable addresses.
//
// The life of a slot: acquire → used on a communication stream, then on the compute stream → release → acquire …
// Within a pass addresses repeat. When no parameter is gathered any more, the slots return to torch's caching allocator.
// The next pass gets them from there without a call to the driver.
//
// What makes a slot safe to use again: `release` records the slot's event on the stream that used it last, and
// `acquire` makes the next user's stream wait for that event. Without it, a gather would overwrite weights that a
// kernel of the previous block still reads. Memory returns to torch's allocator in `free_unused`, which first orders the
// stream that it was allocated on behind the last use; so `record_stream` is never needed. A slot that an exception
// drops does the same by itself: what was queued for its last user may still read or write it.
//
// Slots are acquired on the compute stream, whoever uses them: memory that is given back for them is free in its order.
#pragma once

#include <memory>

#include "base/common.h"
#include "memory/retry.h"
#include "memory/windows.h"

namespace ldc {

class Arena {
 public:
  struct Slot {
    Slot(Tensor memory, Stream allocated_on, std::shared_ptr<int64_t> total);
    ~Slot();
    Slot(const Slot&) = delete;
    Slot& operator=(const Slot&) = delete;
    int64_t capacity() const { return bytes.numel(); }

    Tensor bytes;         // uint8
    bool recorded = false;  // its memory belongs to a device graph, whose replays write to it: nobody else gets it
    Stream allocated_on;  // current when the memory was allocated; torch hands freed memory out again in its order
    std::optional<Stream> user;  // that uses it, as long as nobody has released it
    Event released;       // the last use of the slot
    Event ready;          // free for the owner of the slot; kept here so that it is created once
    std::unique_ptr<Windows::Use> window;  // whose memory it is, if that is not torch's
    std::shared_ptr<int64_t> total;  // bytes of all slots alive, also of those that an error made somebody drop
  };
  using Lease = std::unique_ptr<Slot>;  // a slot in use; give it back with release()

  explicit Arena(Device device) : device_(device) {}

  /// A slot of at least `need` bytes that `user` may write at once: the smallest free one that wastes at most a
  /// quarter (and 1 MiB), else fresh memory.
  Lease acquire(int64_t need, const Stream& user);
  /// A slot over a window's memory, whose user may write at once.
  Lease over(std::unique_ptr<Windows::Use> window, const Stream& user);

  /// Takes a slot back; everything queued on `last_user` so far still sees its contents. A recorded one goes back to
  /// the graph that it belongs to.
  void release(Lease slot, const Stream& last_user);

  /// Frees the unused slots; returns their bytes.
  int64_t free_unused();
  /// The same where nothing that was queued will run: a recording has failed.
  void drop_unused() { free_.clear(); }

  /// Sets the function that gives memory back when there is none for a slot.
  void retry_with(GiveBack give_back) { give_back_ = std::move(give_back); }

  /// Counts the bytes of slots that are made elsewhere, too.
  const std::shared_ptr<int64_t>& total() const { return bytes_; }
  int64_t bytes() const { return *bytes_; }  // held from torch's allocator, leased slots included
  int64_t peak_bytes() const { return peak_bytes_; }
  void reset_peak() { peak_bytes_ = *bytes_; }

 private:
  Lease allocate(int64_t capacity, const Stream& user);

  Device device_;
  std::vector<Lease> free_;
  Event scratch_;
  GiveBack give_back_;
  std::shared_ptr<int64_t> bytes_ = std::make_shared<int64_t>(0);
  int64_t peak_bytes_ = 0;
};

}  // namespace ldc

// Memory that the ranks of one host read from each other, and a barrier between their streams: what gathers through
// symmetric memory are made of. One implementation, on CUDA; the interface lets the order of things be tested without.
#pragma once

#include <string>
#include <vector>

#include "base/common.h"

namespace ldc {

/// One copy between memories that this rank can address.
struct Copy {
  void* to;
  const void* from;
  int64_t bytes;
};

/// A workspace of equal size on every rank. Life of one: offer() on every rank; connect() with everybody's offers;
/// connected() when it has succeeded everywhere; copy() and barrier() any number of times; leave(), when this rank has
/// nothing queued that uses it; free(), when everybody has left. Then it can be offered anew, in another size.
/// What fails raises, and the caller says so to the other ranks. Nothing here waits for a peer.
class PeerMemory {
 public:
  PeerMemory() = default;
  virtual ~PeerMemory() = default;
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  /// Allocates this rank's part. Returns what the others need in order to reach it: at most `kLongestOffer` bytes.
  virtual std::string offer(int64_t bytes) = 0;
  /// Makes the memory of all ranks reachable, and tries it out.
  virtual void connect(const std::vector<std::string>& offers) = 0;
  virtual void connected() = 0;

  /// Where a rank's workspace begins, in the addresses of this process.
  virtual std::byte* of(int64_t rank) const = 0;
  /// Queues copies on the current stream, in no order among themselves. `local`: none of them crosses ranks.
  virtual void copy(const std::vector<Copy>& copies, bool local) = 0;
  /// What is queued on the current stream from now on runs after everything that the other ranks queued before they
  /// called this as often as this rank has.
  virtual void barrier() = 0;
  /// The ranks that have come to fewer barriers than this one, on their devices.
  virtual std::vector<int64_t> behind() const = 0;

  /// Lets everything pass that waits in a barrier on this rank, now and later: what is copied then is worthless. Any
  /// thread, any time; takes no lock that another call may hold for long, and does not use the device.
  virtual void release() noexcept = 0;

  /// Gives up the others' memory. Idempotent.
  virtual void leave() = 0;
  /// Whether all ranks have left.
  virtual bool all_left() const = 0;
  virtual void free() = 0;

  static constexpr size_t kLongestOffer = 255;
};

}  // namespace ldc

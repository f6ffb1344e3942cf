// Where pools and slabs get host memory: pinned where the device has streams, near the device, within one limit.
//
// What may hold less than was promised: a container's limit, the driver's own, or memory that others have taken since.
// Then nothing is lost: what nobody uses is given back first, and whoever asked is told how much was missing.
// `ulimit -l` is none of these: CUDA's driver does not count pinned memory against it.
#pragma once

#include <atomic>
#include <functional>
#include <string>

#include "base/common.h"
#include "memory/numa.h"

namespace ldc {

class HostMemory {
 public:
  using Allocate = std::function<Tensor(int64_t bytes)>;

  /// `limit`: most bytes held at a time; 0: half of the host's memory. `allocate` is torch's allocator unless a test has
  /// another.
  HostMemory(Device device, int64_t limit, NumaPlace place = {}, Allocate allocate = {});

  /// Uninitialised memory. Raises OutOfMemoryError with what was asked, held and allowed, and what to do.
  Tensor take(int64_t bytes, std::string_view purpose);
  /// The same; returns an undefined tensor and the error's text in `shortage` where there is none.
  Tensor try_take(int64_t bytes, std::string_view purpose, std::string& shortage);
  /// Call when memory that was taken is gone.
  void give_back(int64_t bytes) { held_ -= bytes; }
  /// torch's allocator keeps pinned memory for the next one who asks; this makes it free that.
  void free_cached() const;
  /// Called where memory is missing: gives back what is held and not used.
  void make_room_with(std::function<void()> make_room) { make_room_ = std::move(make_room); }

  /// Whether the limit allows so much more, after making room if it must.
  bool can_allow(int64_t bytes) const;
  bool allows(int64_t bytes) const { return held_ + bytes <= limit_; }
  int64_t held() const { return held_; }
  /// The NUMA node that memory comes from; -1: any.
  int64_t node() const { return node_; }

 private:
  void make_room() const;

  const Device device_;
  const int64_t limit_;
  const NumaPlace place_;
  const int64_t node_;
  Allocate allocate_;
  std::function<void()> make_room_;
  std::atomic<int64_t> held_ = 0;
};

}  // namespace ldc

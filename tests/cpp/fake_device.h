// A device with streams, for tests of what is ordered behind what: no work takes time on it, and its memory is the
// host's.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <map>
#include <vector>

namespace ldc::testing {

/// What the fake device did, and whether it answers at all. Streams are numbered as they are made; 0 computes.
struct FakeDevice {
  using Clock = std::map<c10::StreamId, int64_t>;  // for each stream, how many of its records lie behind
  /// Work that is queued on a stream: what waits for the `point`th record of the stream, or a later one, is behind it.
  struct Work {
    c10::StreamId stream = 0;
    int64_t point = 0;
    Clock before = {};  // what was behind the stream by then
    bool is_behind(const Work& other) const {
      const auto known = before.find(other.stream);
      return stream == other.stream || (known != before.end() && known->second >= other.point);
    }
  };

  static FakeDevice& instance();
  c10::Device device() const { return {c10::DeviceType::PrivateUse1, 0}; }
  /// Records of `stream` so far.
  int64_t now(c10::StreamId stream) { return clocks[stream][stream]; }
  /// Whether what is queued on `stream` from now on runs behind the `point`th record of `other`.
  bool is_behind(c10::StreamId stream, c10::StreamId other, int64_t point) { return clocks[stream][other] >= point; }
  bool is_behind(c10::StreamId stream, const Work& work) { return queue(stream).is_behind(work); }
  /// Work that is queued on a stream now.
  Work queue(c10::StreamId stream) { return {stream, now(stream) + 1, clocks[stream]}; }
  /// A tensor of the device, with the values and the memory of one of the host.
  at::Tensor tensor(const at::Tensor& host) const;

  std::map<c10::StreamId, Clock> clocks;
  c10::StreamId current = 0;
  c10::StreamId made = 0;
  std::vector<Work> copies;  // from and to tensors of the device
  std::vector<c10::StreamId> allocations;  // where memory of the device was taken
  bool lost = false;         // every wait of the host fails
};

}  // namespace ldc::testing

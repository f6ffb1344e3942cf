// A device with streams, for tests of what is ordered behind what: no work takes time on it, and its memory is the
// host's.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <map>

namespace ldc::testing {

/// What the fake device did, and whether it answers at all. Streams are numbered as they are made; 0 computes.
struct FakeDevice {
  using Clock = std::map<c10::StreamId, int64_t>;  // for each stream, how many of its records lie behind

  static FakeDevice& instance();
  c10::Device device() const { return {c10::DeviceType::PrivateUse1, 0}; }
  /// Records of `stream` so far.
  int64_t now(c10::StreamId stream) { return clocks[stream][stream]; }
  /// Whether what is queued on `stream` from now on runs behind the `point`th record of `other`.
  bool is_behind(c10::StreamId stream, c10::StreamId other, int64_t point) { return clocks[stream][other] >= point; }

  std::map<c10::StreamId, Clock> clocks;
  c10::StreamId current = 0;
  c10::StreamId made = 0;
  bool lost = false;  // every wait of the host fails
};

}  // namespace ldc::testing

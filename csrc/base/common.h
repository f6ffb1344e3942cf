// Checks, device streams and events: what every other file of the runtime stands on.
//
// Only the files that are named after CUDA and NCCL include their headers. Everything else speaks c10's device-agnostic
// streams and events, so one source serves CPU, CUDA and any other device that torch knows. On a device without streams
// (CPU) the helpers below do nothing: work is finished when the call that did it returns.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <vector>

// A failure while running. `LDC_CHECK_ARG` is for arguments that the caller got wrong; it becomes a ValueError.
#define LDC_CHECK(condition, ...) TORCH_CHECK(condition, "lightning_deepcompile: ", __VA_ARGS__)
#define LDC_CHECK_ARG(condition, ...) TORCH_CHECK_VALUE(condition, "lightning_deepcompile: ", __VA_ARGS__)
// A failure of the wire: torch.distributed.DistBackendError, which is a RuntimeError.
#define LDC_CHECK_WIRE(condition, ...) \
  TORCH_CHECK_WITH(DistBackendError, condition, "lightning_deepcompile: ", __VA_ARGS__)

namespace ldc {

using at::Tensor;
using c10::Device;
using c10::ScalarType;
using c10::Stream;
using Ids = std::vector<int64_t>;
using Shape = c10::IntArrayRef;      // a view that compares and prints
using Dtype = std::optional<ScalarType>;  // empty: the dtype that the data already has

inline bool has_streams(Device device) { return device.type() != c10::DeviceType::CPU; }

inline Stream current_stream(Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

/// A stream from torch's pool; the default "stream" on a device that has none.
inline Stream pool_stream(Device device, bool high_priority) {
  if (!has_streams(device)) return current_stream(device);
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, high_priority);
}

/// Blocks the calling thread until the device is idle.
inline void synchronize_device(Device device) {
  if (has_streams(device)) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

/// A point in a stream that other streams can wait for. Recording again moves it; waits that were already queued keep
/// the point they saw. One object is reused for many records, since creating device events costs host time.
class Event {
 public:
  void record(const Stream& stream) {
    if (!has_streams(stream.device())) return;
    if (!event_) event_.emplace(stream.device_type());
    event_->record(stream);
  }
  /// Work queued on `stream` from now on runs after the recorded point. Nothing recorded: no wait.
  void block(const Stream& stream) const {
    if (event_) event_->block(stream);
  }
  /// Whether the recorded point has been passed. Nothing recorded: yes.
  bool reached() const { return !event_ || event_->query(); }
  /// Blocks the calling thread until it has.
  void synchronize() const {
    if (event_) event_->synchronize();
  }

 private:
  std::optional<c10::Event> event_;
};

/// `after` runs behind everything queued on `before` so far.
inline void order(Event& scratch, const Stream& before, const Stream& after) {
  if (before == after) return;
  scratch.record(before);
  scratch.block(after);
}

/// Makes a stream of the runtime's own the current one, as long as it lives.
///
/// If an exception ends it, the previous stream waits for the queued work, because memory that the exception frees
/// returns to that stream's pool, which may reuse it at once. So tensors that the work reads or writes must outlive this
/// object. Within it, allocate memory for the work only: a rank that is short of memory makes the current stream wait for
/// the memory that it gives back.
class Detour {
 public:
  explicit Detour(const Stream& side)
      : before_(current_stream(side.device())), side_(side), exceptions_(std::uncaught_exceptions()), guard_(side) {}
  ~Detour() {
    if (std::uncaught_exceptions() <= exceptions_ || before_ == side_) return;
    try {
      Event queued;
      order(queued, side_, before_);
    } catch (const std::exception& error) {
      TORCH_WARN_ONCE("lightning_deepcompile: nobody waits for what a failed operation has queued: ", error.what());
    }
  }
  Detour(const Detour&) = delete;
  Detour& operator=(const Detour&) = delete;

 private:
  const Stream before_, side_;
  const int exceptions_;
  const c10::StreamGuard guard_;
};

/// State in which the runtime touches tensors: no autograd graph, and no inference tensors (a buffer made during
/// validation is used again in training, where an inference tensor could not be saved for backward).
struct PlainTensors {
  c10::AutoGradMode no_grad{false};
  c10::InferenceMode no_inference{false};
};

/// What an exception says, without the C++ backtrace that torch appends.
inline std::string message_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
}

inline int64_t align_up(int64_t value, int64_t alignment) { return (value + alignment - 1) / alignment * alignment; }

// Buffers inside one slot start at multiples of this; enough for vectorised kernels and for NCCL's fastest protocols.
inline constexpr int64_t kAlignment = 512;

}  // namespace ldc

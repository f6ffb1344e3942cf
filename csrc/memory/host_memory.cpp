#include "memory/host_memory.h"

#pragma GCC diagnostic push
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Winterference-size"  // in torch's own templates
#endif
#include <ATen/core/CachingHostAllocator.h>
#pragma GCC diagnostic pop
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <unistd.h>

#include <bit>

#ifdef LDC_WITH_NCCL
#include "base/cuda_error.h"
#endif

namespace ldc {
namespace {

int64_t half_of_memory() { return sysconf(_SC_PHYS_PAGES) / 2 * sysconf(_SC_PAGE_SIZE); }

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

/// A refusal is answered here; else the next kernel launch would find it and fail.
void forget_device_error([[maybe_unused]] Device device) {
#ifdef LDC_WITH_NCCL
  if (device.is_cuda()) forget_cuda_error();
#endif
}

}  // namespace

HostMemory::HostMemory(Device device, int64_t limit, Allocate allocate)
    : device_(device), limit_(limit > 0 ? limit : half_of_memory()), allocate_(std::move(allocate)) {
  if (!allocate_) {
    const auto options = at::TensorOptions().dtype(c10::kByte).pinned_memory(has_streams(device));
    allocate_ = [options](int64_t bytes) { return at::empty({bytes}, options); };
  }
}

int64_t HostMemory::round_up(int64_t bytes) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes)));
}

std::unique_ptr<HostMemory::Block> HostMemory::take(int64_t bytes, std::string_view purpose) {
  std::string shortage;
  std::unique_ptr<Block> block = try_take(bytes, purpose, shortage);
  TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, shortage);
  return block;
}

std::unique_ptr<HostMemory::Block> HostMemory::try_take(int64_t bytes, std::string_view purpose,
                                                        std::string& shortage) {
  if (!can_allow(bytes)) {
    shortage = c10::str("lightning_deepcompile: no host memory for ", bytes, " more bytes of ", purpose, ": ", held(),
                        " of at most ", limit_, " bytes are in use. Offload less, or raise `host_limit` (with the "
                        "strategy: `host_memory_budget`).");
    return {};
  }
  std::string reason;
  for (const bool last : {false, true}) {
    try {
      const c10::DeviceGuard guard(device_);  // this may be a thread whose current device is another one
      return std::make_unique<Block>(allocate_(bytes), shared_from_this());
    } catch (const std::exception& error) {
      reason = first_line(message_of(error));
    }
    forget_device_error(device_);
    if (!last) make_room();
  }
  shortage = c10::str("lightning_deepcompile: the host refused ", bytes, " bytes of ",
                      has_streams(device_) ? "pinned " : "", "memory for ", purpose, ", with ", held(),
                      " held of at most ", limit_, " (", reason, "). Give CompileConfig(host_memory_budget=...) what the "
                      "host really has, for all ranks of the node together, so that less leaves or training ends before it starts; or free host memory, "
                      "or raise the container's memory limit.");
  return {};
}

bool HostMemory::can_allow(int64_t bytes) const {
  if (!allows(bytes)) make_room();
  return allows(bytes);
}

void HostMemory::make_room() const {
  if (make_room_) make_room_();
  free_cached();
}

void HostMemory::free_cached() const {
  if (has_streams(device_)) at::getHostAllocator(device_.type())->empty_cache();
}

}  // namespace ldc

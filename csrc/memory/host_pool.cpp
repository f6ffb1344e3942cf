#include "memory/host_pool.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

namespace ldc {
namespace {

constexpr int64_t kSmallest = 4096;

}  // namespace

std::unique_ptr<HostPool::Buffer> HostPool::free_buffer(int64_t capacity) {
  const std::lock_guard lock(mutex_);
  const auto found = free_.find(capacity);
  if (found == free_.end()) return nullptr;
  std::unique_ptr<Buffer> buffer = std::move(found->second);
  free_.erase(found);
  return buffer;
}

HostPool::Lease HostPool::acquire(const Tensor& like, const Stream& writer) {
  std::string shortage;
  Lease lease = try_acquire(like, writer, shortage);
  TORCH_CHECK_WITH(OutOfMemoryError, lease.tensor.defined(), shortage);
  return lease;
}

HostPool::Lease HostPool::try_acquire(const Tensor& like, const Stream& writer, std::string& shortage,
                                      bool grow) {
  const int64_t capacity = HostMemory::round_up(std::max(static_cast<int64_t>(like.nbytes()), kSmallest));
  std::unique_ptr<Buffer> buffer = free_buffer(capacity);
  if (!buffer && !grow) {
    shortage = "no buffer is free";
    return {};
  }
  if (!buffer) {
    buffer = std::make_unique<Buffer>();
    // Without the lock: where memory is missing, this pool is asked for what it has to spare.
    buffer->memory = memory_->try_take(capacity, "offloaded tensors", shortage);
    if (!buffer->memory) return {};
    const std::lock_guard lock(mutex_);
    bytes_ += capacity;
  }
  buffer->used.block(writer);
  Buffer* address = buffer.get();
  const bool dense = like.is_non_overlapping_and_dense();
  const std::vector<int64_t> strides =
      dense ? like.strides().vec() : at::empty(like.sizes(), like.options().device(c10::kMeta)).strides().vec();
  auto owner = std::make_unique<Owner>(shared_from_this(), std::move(buffer));
  return {at::for_blob(address->memory->data(), like.sizes())
              .strides(strides)
              .context(owner.release(), &HostPool::end_lease)
              .options(at::TensorOptions().dtype(like.scalar_type()))
              .make_tensor(),
          address};
}

HostPool::Buffer* HostPool::buffer_of(const Tensor& tensor) {
  const Owner* owner = tensor.storage().data_ptr().cast_context<Owner>(&HostPool::end_lease);
  return owner == nullptr ? nullptr : owner->buffer.get();
}

void HostPool::end_lease(void* owner) noexcept {
  const std::unique_ptr<Owner> ending(static_cast<Owner*>(owner));
  try {
    ending->pool->take_back(ending->buffer);
  } catch (const std::exception& error) {
    // The device may still write to the buffer, or read what is copied there: neither is ever freed.
    static_cast<void>(ending->buffer.release());
    TORCH_WARN_ONCE("lightning_deepcompile: a buffer of offloaded tensors stays allocated, as nobody knows whether the "
                    "device is done with it: ", message_of(error));
  }
}

/// Leaves `buffer` with the caller if it raises.
void HostPool::take_back(std::unique_ptr<Buffer>& buffer) {
  if (buffer->source.defined()) {  // a step that was given up between the copy and the wait for it
    buffer->used.synchronize();
    buffer->source.reset();
  }
  const std::lock_guard lock(mutex_);
  const int64_t capacity = buffer->memory->bytes();
  free_.emplace(capacity, std::move(buffer));
}

int64_t HostPool::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

void HostPool::free_unused() {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) return;
  while (!free_.empty()) {
    const auto first = free_.begin();
    first->second->used.synchronize();
    bytes_ -= first->first;
    free_.erase(first);
  }
  memory_->free_cached();
}

}  // namespace ldc

// Host memory for tensors that leave the device for a while: pinned where the device has streams, reused, bounded.
//
// A buffer returns to the pool when the last tensor over it is gone, on whatever thread that happens. The copies that
// still run then are covered by its `used` event: the next writer's stream waits for it, the host never does.
// Capacities are powers of two (HostMemory::round_up), so sizes that differ a little share buffers.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "memory/host_memory.h"

namespace ldc {

class HostPool : public std::enable_shared_from_this<HostPool> {
 public:
  struct Buffer {
    std::unique_ptr<HostMemory::Block> memory;
    Event used;     // the last copy from or to it
    Tensor source;  // what is being copied here, as long as its memory may not be used for anything else
  };
  /// A tensor over a buffer. The buffer is valid as long as the tensor is alive.
  struct Lease {
    Tensor tensor;
    Buffer* buffer = nullptr;
  };

  explicit HostPool(std::shared_ptr<HostMemory> memory) : memory_(std::move(memory)) {}

  /// A host tensor with the layout of `like`, for work that is queued on `writer` from now on. Raises OutOfMemoryError
  /// where there is no memory, or its limit allows no more.
  Lease acquire(const Tensor& like, const Stream& writer);
  /// The same; instead of an error, and where the pool must not grow, an undefined tensor, and why.
  Lease try_acquire(const Tensor& like, const Stream& writer, std::string& shortage, bool grow = true);
  /// The buffer that `tensor` lies in, if it, or a tensor that it is a view of, came from a pool; else null.
  static Buffer* buffer_of(const Tensor& tensor);

  int64_t bytes() const;  // held, free buffers included
  /// Frees unused buffers; waits for their last copies.
  void free_unused();

 private:
  /// What the memory of a leased tensor belongs to.
  struct Owner {
    std::shared_ptr<HostPool> pool;
    std::unique_ptr<Buffer> buffer;
  };
  static void end_lease(void* owner) noexcept;  // storages call it from their destructors

  std::unique_ptr<Buffer> free_buffer(int64_t capacity);  // one that nobody holds, or null
  void take_back(std::unique_ptr<Buffer>& buffer);

  const std::shared_ptr<HostMemory> memory_;
  mutable std::mutex mutex_;
  std::multimap<int64_t, std::unique_ptr<Buffer>> free_;  // by capacity
  int64_t bytes_ = 0;
};

}  // namespace ldc

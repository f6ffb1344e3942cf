#include "memory/arena.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace ldc {

Arena::Slot::Slot(Tensor memory, Stream allocated_on, std::shared_ptr<int64_t> total)
    : bytes(std::move(memory)), allocated_on(allocated_on), total(std::move(total)) {
  *this->total += capacity();
}

Arena::Slot::~Slot() {
  *total -= capacity();
  if (!user || recorded || window || !has_streams(allocated_on.device())) return;
  try {
    order(released, *user, allocated_on);
    order(released, current_stream(allocated_on.device()), allocated_on);
  } catch (const std::exception& error) {
    static_cast<void>(bytes.unsafeReleaseTensorImpl());  // is never freed
    TORCH_WARN_ONCE("lightning_deepcompile: a buffer stays allocated, as nobody knows whether the device is done with "
                    "it: ", message_of(error));
  }
}

Arena::Lease Arena::acquire(int64_t need, const Stream& user) {
  need = align_up(std::max<int64_t>(need, 1), kAlignment);
  const int64_t limit = need + need / 4 + (int64_t{1} << 20);
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const int64_t capacity = (*it)->capacity();
    if (capacity >= need && capacity <= limit && (best == free_.end() || capacity < (*best)->capacity())) best = it;
  }
  // A little spare room lets groups of almost the same size (an embedding, and a head with its norm) share a slot.
  if (best == free_.end()) return allocate(align_up(need + need / 64, kAlignment), user);
  (*best)->released.block(user);
  Lease slot = std::move(*best);
  free_.erase(best);
  slot->user = user;
  return slot;
}

Arena::Lease Arena::allocate(int64_t capacity, const Stream& user) {
  const PlainTensors plain;
  const auto fresh = [&] { return at::empty({capacity}, at::TensorOptions().dtype(c10::kByte).device(device_)); };
  const Stream allocated_on = current_stream(device_);
  Tensor memory = allocate_with_retry(
      [this] {
        const int64_t freed = free_unused();  // slots of other sizes may be what is in the way
        return freed > 0 || !give_back_ ? freed : give_back_();
      },
      fresh);
  // Torch's allocator hands out memory that is free in the order of the current stream, which may still be using it.
  order(scratch_, allocated_on, user);
  auto slot = std::make_unique<Slot>(std::move(memory), allocated_on, bytes_);
  slot->user = user;
  peak_bytes_ = std::max(peak_bytes_, *bytes_);
  return slot;
}

Arena::Lease Arena::over(std::unique_ptr<Windows::Use> window, const Stream& user) {
  auto slot = std::make_unique<Slot>(window->bytes(), user, std::make_shared<int64_t>(0));
  slot->window = std::move(window);
  return slot;
}

void Arena::release(Lease slot, const Stream& last_user) {
  if (slot->recorded) return;
  if (slot->window) return slot->window->release(last_user);
  slot->user = last_user;
  slot->released.record(last_user);
  free_.push_back(std::move(slot));
  free_.back()->user.reset();
}

int64_t Arena::free_unused() {
  int64_t freed = 0;
  for (const Lease& slot : free_) {
    slot->released.block(slot->allocated_on);
    freed += slot->capacity();
  }
  free_.clear();
  return freed;
}

}  // namespace ldc

#include "memory/windows.h"

namespace ldc {

namespace {

constexpr int64_t kPage = int64_t{2} << 20;  // of the driver

}  // namespace

void Windows::Use::release(const Stream& last_user) {
  Window& window = owner_->all_[place_];
  window.released.record(last_user);
  window.ordered = true;
}

std::unique_ptr<Windows::Use> Windows::take(int64_t need, const Stream& user) {
  if (refused_ || need < threshold_) return nullptr;
  need = align_up(need, kPage);
  const int64_t limit = need + need / 4 + (int64_t{1} << 20);
  size_t best = all_.size();
  for (size_t i = 0; i < all_.size(); ++i) {
    if (all_[i].taken || !all_[i].bytes.defined()) continue;
    const int64_t capacity = all_[i].bytes.numel();
    if (capacity < need || capacity > limit) continue;
    if (best == all_.size() || capacity < all_[best].bytes.numel()) best = i;
  }
  if (best == all_.size()) {
    Tensor memory = make_(need);
    if (!memory.defined()) {
      refused_ = true;
      return nullptr;
    }
    bytes_ += memory.numel();
    all_.push_back({std::move(memory), {}, false, true});
  }
  Window& window = all_[best];
  if (!window.ordered) synchronize_device(device_);
  window.released.block(user);
  window.taken = true;
  window.ordered = false;
  digest_ = (digest_ * 31 + best + 1) % 0x7fffffff;
  return std::make_unique<Use>(shared_from_this(), best);
}

void Windows::free_unused() {
  bool idle = false;
  for (Window& window : all_) {
    if (window.taken || !window.bytes.defined()) continue;
    if (!std::exchange(idle, true)) synchronize_device(device_);
    bytes_ -= window.bytes.numel();
    drop_(window.bytes);
    window = {};
  }
  refused_ = false;  // there may be memory now
}

}  // namespace ldc

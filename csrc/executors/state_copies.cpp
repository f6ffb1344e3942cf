#include "executors/state_copies.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "memory/views.h"

namespace ldc {

StateCopies::StateCopies(Device device, Stats& stats, std::shared_ptr<HostMemory> memory)
    : device_(device),
      stats_(stats),
      out_(pool_stream(device, /*high_priority=*/false)),
      in_(pool_stream(device, /*high_priority=*/false)),
      slabs_(std::move(memory), "optimizer states", [this] { wait_for_copies(); }) {}

namespace {

int64_t buffer_bytes(const std::vector<Tensor>& host_buffers) {
  int64_t need = 0;
  for (const Tensor& host_buffer : host_buffers) {
    LDC_CHECK_ARG(host_buffer.device().is_cpu() && host_buffer.is_contiguous(),
                  "states.fetch: needs what states.host_buffer() returned.");
    append(need, static_cast<int64_t>(host_buffer.nbytes()));
  }
  return need;
}

}  // namespace

void StateCopies::expect(std::vector<std::vector<Tensor>> chunks, std::vector<std::vector<int64_t>> slots) {
  LDC_CHECK_ARG(chunks.size() == slots.size(), "states.expect: ", chunks.size(), " chunks but slots of ", slots.size(),
                ".");
  forget_fetched();
  expected_ = std::move(chunks);
  expected_from_ = std::move(slots);
}

void StateCopies::advance(int64_t count) {
  for (; count > 0 && advanced_.size() < expected_.size(); --count) {
    const std::vector<Tensor>& host_buffers = expected_[advanced_.size()];
    Slot& target = slots_[ahead(advanced_.size())];
    release(target);
    for (const int64_t slot : expected_from_[advanced_.size()]) slots_[slot].left.block(in_);
    advanced_.push_back(copy_in(target, host_buffers, buffer_bytes(host_buffers)));
  }
}

std::vector<std::vector<Tensor>> StateCopies::take() { return std::exchange(advanced_, {}); }

void StateCopies::forget_fetched() {
  const size_t count = std::exchange(advanced_, {}).size();
  for (size_t chunk = 0; chunk < count; ++chunk) release(slots_[ahead(chunk)]);
}

void StateCopies::begin(int64_t slot_bytes) {
  LDC_CHECK_ARG(slot_bytes >= 0, "states.begin: `slot_bytes` must not be negative, got ", slot_bytes, ".");
  for (auto& [number, slot] : slots_) {
    if (number >= 0) settle(slot);
  }
  slot_bytes_ = slot_bytes;
  order(scratch_, out_, in_);
  order(scratch_, current_stream(device_), in_);
}

std::vector<Tensor> StateCopies::fetch(int64_t slot, const std::vector<Tensor>& host_buffers) {
  LDC_CHECK_ARG(slot >= 0, "states.fetch: there is no slot ", slot, ".");
  Slot& target = slots_[slot];
  release_held(target);
  if (host_buffers.empty()) return {};
  const int64_t need = buffer_bytes(host_buffers);
  if (target.memory.defined() && target.memory.numel() < need) release(target);
  return copy_in(target, host_buffers, std::max(need, slot_bytes_));
}

/// Copies into the slot's memory, `bytes` of which are allocated if there is none.
std::vector<Tensor> StateCopies::copy_in(Slot& target, const std::vector<Tensor>& host_buffers, int64_t bytes) {
  const PlainTensors plain;
  if (!target.memory.defined()) {
    target.memory = allocate_with_retry(
        give_back_, [&] { return at::empty({bytes}, at::TensorOptions().dtype(c10::kByte).device(device_)); });
    order(scratch_, current_stream(device_), in_);
    note_device_bytes();
  }
  target.left.block(in_);
  std::vector<Tensor> arriving;
  const Detour detour(in_);
  int64_t offset = 0;
  for (const Tensor& host_buffer : host_buffers) {
    const auto size = static_cast<int64_t>(host_buffer.nbytes());
    arriving.push_back(typed_view(target.memory, append(offset, size), host_buffer.sizes(), host_buffer.scalar_type()));
    arriving.back().copy_(host_buffer, /*non_blocking=*/true);
    stats_.reloaded_bytes += size;
  }
  target.arrived.record(in_);
  return arriving;
}

void StateCopies::wait(int64_t slot) {
  const auto found = slots_.find(slot);
  LDC_CHECK_ARG(found != slots_.end(), "states.wait: nothing was fetched into slot ", slot, ".");
  found->second.arrived.block(current_stream(device_));
}

void StateCopies::stow(int64_t slot, const std::vector<Tensor>& sources, const std::vector<Tensor>& host_buffers) {
  Slot& origin = slots_[slot];
  LDC_CHECK_ARG(sources.size() == host_buffers.size(), "states.stow: ", sources.size(), " tensors but ",
                host_buffers.size(), " host buffers.");
  origin.stowed = ++stows_;
  // Also with nothing to copy: the slot may have been read, and what was stowed before may still be leaving.
  const PlainTensors plain;
  order(scratch_, current_stream(device_), out_);
  const Detour detour(out_);
  for (size_t i = 0; i < sources.size(); ++i) {
    host_buffers[i].copy_(sources[i], /*non_blocking=*/true);
    stats_.offloaded_bytes += static_cast<int64_t>(sources[i].nbytes());
    const bool in_buffer = origin.memory.defined() && sources[i].is_alias_of(origin.memory);
    if (!in_buffer) origin.held.push_back(sources[i]);
  }
  origin.left.record(out_);
  note_device_bytes();
}

void StateCopies::release_held(Slot& slot) {
  if (slot.held.empty()) return;
  slot.left.block(current_stream(device_));
  slot.held.clear();
}

void StateCopies::settle(Slot& slot) {
  if (slot.empty()) return;
  slot.arrived.block(current_stream(device_));
  slot.left.block(current_stream(device_));
  slot.held.clear();
  slot.memory.reset();
}

void StateCopies::settle() {
  forget_fetched();
  for (auto& [number, slot] : slots_) settle(slot);
}

void StateCopies::settle_first(int64_t count) {
  for (; count > 0; --count) {
    Slot* first = nullptr;
    for (auto& [number, slot] : slots_) {
      if (slot.stowed > 0 && !slot.empty() && (first == nullptr || slot.stowed < first->stowed)) first = &slot;
    }
    if (first == nullptr) return;
    settle(*first);
  }
}

void StateCopies::release(Slot& slot) {
  if (has_streams(device_)) {
    if (slot.memory.defined()) slot.held.push_back(slot.memory);
    for (const Tensor& tensor : slot.held) {
      tensor.record_stream(in_);  // what was fetched and never used
      tensor.record_stream(out_);
    }
  }
  slot.held.clear();
  slot.memory.reset();
  slot.stowed = 0;
}

void StateCopies::release() {
  for (auto& [number, slot] : slots_) {
    if (number >= 0 || number <= ahead(advanced_.size())) release(slot);
  }
}

void StateCopies::wait_for_copies() const {
  for (const auto& [number, slot] : slots_) {
    slot.arrived.synchronize();
    slot.left.synchronize();
  }
}

void StateCopies::synchronize() {
  wait_for_copies();
  slabs_.free_unused();
}

int64_t StateCopies::device_bytes() const {
  int64_t total = 0;
  for (const auto& [number, slot] : slots_) {
    if (slot.memory.defined()) total += slot.memory.numel();
    for (const Tensor& held : slot.held) total += static_cast<int64_t>(held.nbytes());
  }
  return total;
}

void StateCopies::note_device_bytes() {
  stats_.state_peak_bytes = std::max(stats_.state_peak_bytes, device_bytes());
}

}  // namespace ldc

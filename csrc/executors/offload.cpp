#include "executors/offload.h"

#include <ATen/ops/empty_strided.h>

#include "memory/views.h"

namespace ldc {

OffloadEngine::OffloadEngine(Device device, Registry& registry, GatherEngine& gathers, Stats& stats,
                             std::shared_ptr<HostMemory> memory)
    : device_(device),
      registry_(registry),
      gathers_(gathers),
      stats_(stats),
      out_(pool_stream(device, /*high_priority=*/false)),
      in_(pool_stream(device, /*high_priority=*/false)),
      pool_(std::make_shared<HostPool>(memory)) {
  memory->make_room_with([pool = std::weak_ptr(pool_)] {
    if (const auto alive = pool.lock()) alive->free_unused();
  });
}

void OffloadEngine::copy_out(const Tensor& source, HostPool::Lease& host, Event& done) {
  order(scratch_, current_stream(device_), out_);
  const Detour detour(out_);
  host.tensor.copy_(source, /*non_blocking=*/true);
  done.record(out_);
  host.buffer->used.record(out_);
  stats_.offloaded_bytes += static_cast<int64_t>(source.nbytes());
}

void OffloadEngine::copy_in(const Tensor& target, HostPool::Lease& host, Event& done) {
  order(scratch_, current_stream(device_), in_);
  done.block(in_);
  const Detour detour(in_);
  target.copy_(host.tensor, /*non_blocking=*/true);
  done.record(in_);
  host.buffer->used.record(in_);
  stats_.reloaded_bytes += static_cast<int64_t>(target.nbytes());
}

Tensor OffloadEngine::device_tensor_like(const Tensor& host) const {
  return allocate_with_retry(give_back_, [&] {
    return at::empty_strided(host.sizes(), host.strides(), host.options().device(device_));
  });
}

Tensor OffloadEngine::offload(const Tensor& tensor, int64_t id) {
  LDC_CHECK_ARG(tensor.defined() && tensor.device() == device_ && tensor.layout() == c10::kStrided,
                "offload_tensor: id ", id, " needs a dense tensor on ", device_, ", got one on ", tensor.device(), ".");
  LDC_CHECK_ARG(!entries_.contains(id), "offload_tensor: id ", id, " is offloaded already. Reload it first ",
                "(reload_tensor and wait_reload), or use another id.");
  const PlainTensors plain;
  Entry entry;
  entry.host = pool_->acquire(tensor, out_);
  // Whoever made the tensor may have another use for its memory as soon as this returns.
  entry.source = tensor.detach();
  if (has_streams(device_)) entry.source = allocate_with_retry(give_back_, [&] { return tensor.detach().clone(); });
  // Memory that nobody touches costs nothing; the host tensor itself is what this call's result must not be, as whoever
  // compiles the caller takes it for free once wait_offload() has returned.
  const Tensor& host = entry.host.tensor;
  const Tensor promised = at::empty_strided(host.sizes(), host.strides(), host.options());
  entry.promised = promised.const_data_ptr();
  copy_out(entry.source, entry.host, entry.done);
  if (!has_streams(device_)) entry.source.reset();
  entries_.emplace(id, std::move(entry));
  return promised;
}

OffloadEngine::Entry& OffloadEngine::entry(std::string_view operation, int64_t id) {
  const auto found = entries_.find(id);
  LDC_CHECK_ARG(found != entries_.end(), operation, ": id ", id, " is not offloaded. Call offload_tensor first.");
  return found->second;
}

Tensor OffloadEngine::wait_offload(int64_t id) {
  Entry& waited = entry("wait_offload", id);
  waited.done.block(current_stream(device_));
  waited.source.reset();
  return with_own_storage(waited.host.tensor);
}

Tensor OffloadEngine::reload(const Tensor& host, int64_t id) {
  Entry& back = entry("reload_tensor", id);
  LDC_CHECK_ARG(!back.target.defined(), "reload_tensor: id ", id, " is being reloaded already. Call wait_reload.");
  LDC_CHECK_ARG(host.defined() && host.device().is_cpu() && host.sizes() == back.host.tensor.sizes() &&
                    (host.const_data_ptr() == back.host.tensor.const_data_ptr() ||
                     host.const_data_ptr() == back.promised),
                "reload_tensor: id ", id, " needs the tensor that offload_tensor returned for it, or wait_offload.");
  const PlainTensors plain;
  const Tensor& copy = back.host.tensor;
  back.target = device_tensor_like(copy);
  copy_in(back.target, back.host, back.done);
  return back.target.detach();
}

Tensor OffloadEngine::wait_reload(int64_t id) {
  Entry& waited = entry("wait_reload", id);
  LDC_CHECK_ARG(waited.target.defined(), "wait_reload: id ", id, " is not being reloaded. Call reload_tensor first.");
  waited.done.block(current_stream(device_));
  const PlainTensors plain;
  // reload()'s result lies in the target, so that whoever compiles the caller takes that for free from here on.
  Tensor own = allocate_with_retry(give_back_, [&] { return waited.target.clone(); });
  entries_.erase(id);
  return own;
}

bool OffloadEngine::owns(const c10::Storage& storage) const {
  if (storage.data() == nullptr) return false;
  // By address, as wait_offload() gives out the memory in a storage of its own.
  const auto lies_in = [&](const Tensor& tensor) {
    return tensor.defined() && tensor.storage().data() == storage.data();
  };
  return std::any_of(entries_.begin(), entries_.end(), [&](const auto& entry) {
    return lies_in(entry.second.host.tensor) || lies_in(entry.second.target);
  });
}

std::vector<Tensor> OffloadEngine::offload_group(const std::vector<Tensor>& tensors) {
  const PlainTensors plain;
  order(scratch_, current_stream(device_), out_);
  const Detour detour(out_);
  std::vector<Tensor> hosts;
  hosts.reserve(tensors.size());
  for (const Tensor& tensor : tensors) {
    if (tensor.device() != device_ || !tensor.is_non_overlapping_and_dense()) {
      hosts.push_back(tensor);
      continue;
    }
    std::string shortage;
    const HostPool::Lease lease = pool_->try_acquire(tensor, out_, shortage, /*grow=*/!short_);
    if (!lease.tensor.defined()) {
      if (!std::exchange(short_, true)) {
        TORCH_WARN(shortage, " Until then saved tensors stay on ", device_, ".");
      }
      ++stats_.stayed_tensors;
      hosts.push_back(tensor);
      continue;
    }
    lease.tensor.copy_(tensor, /*non_blocking=*/true);
    lease.buffer->used.record(out_);
    lease.buffer->source = tensor.detach();
    stats_.offloaded_bytes += static_cast<int64_t>(tensor.nbytes());
    hosts.push_back(lease.tensor);
  }
  return hosts;
}

std::vector<Tensor> OffloadEngine::reload_group(const std::vector<Tensor>& hosts) {
  const PlainTensors plain;
  std::vector<Tensor> targets;
  targets.reserve(hosts.size());
  for (const Tensor& host : hosts) {
    if (HostPool::buffer_of(host) != nullptr) {
      targets.push_back(device_tensor_like(host));
    } else {  // never left, or a user's saved-tensor hooks have packed it into memory of their own
      targets.push_back(allocate_with_retry(give_back_, [&] { return host.to(device_); }));
    }
  }
  order(scratch_, current_stream(device_), in_);
  const Detour detour(in_);
  for (size_t i = 0; i < hosts.size(); ++i) {
    HostPool::Buffer* buffer = HostPool::buffer_of(hosts[i]);
    if (buffer == nullptr) continue;
    buffer->used.block(in_);
    targets[i].copy_(hosts[i], /*non_blocking=*/true);
    buffer->used.record(in_);
    stats_.reloaded_bytes += static_cast<int64_t>(hosts[i].nbytes());
  }
  return targets;
}

void OffloadEngine::wait_copies(const std::vector<Tensor>& hosts) {
  for (const Tensor& host : hosts) {
    HostPool::Buffer* buffer = HostPool::buffer_of(host);
    if (buffer == nullptr) continue;
    buffer->used.block(current_stream(device_));
    buffer->source.reset();
  }
}

void OffloadEngine::check_own_storage(const Param& param) const {
  LDC_CHECK_ARG(!param.host.defined(), "offload_parameter: the shard of '", param.name,
                "' lives in host memory already.");
  const c10::Storage& storage = param.shard.storage();
  const bool own = static_cast<int64_t>(storage.nbytes()) == static_cast<int64_t>(param.shard.nbytes()) &&
                   storage.resizable() && storage.allocator() != nullptr;
  LDC_CHECK_ARG(own && !registry_.shares_storage(param), "offload_parameter: the shard of '", param.name,
                "' shares its memory with other tensors. Register a shard with a storage of its own.");
}

/// In-place operations count it up. Empty for inference tensors, which have none.
std::optional<uint32_t> OffloadEngine::version_of(const Tensor& tensor) {
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? std::optional(counter.current_version()) : std::nullopt;
}

void OffloadEngine::offload_param(int64_t id) {
  Param& param = registry_.at(id);
  Shard& shard = shards_[id];
  free_departed();
  if (shard.place != Place::device) return;
  check_own_storage(param);
  const PlainTensors plain;
  // The gather that still reads the shard, and the copy that may still write it, come first.
  gathers_.order_behind_gathers(out_);
  shard.done->block(out_);
  param.arriving.reset();
  if (shard.version && shard.version == version_of(param.shard)) {
    shard.done->record(out_);
  } else {
    if (!shard.copy.tensor.defined()) shard.copy = pool_->acquire(param.shard, out_);
    copy_out(param.shard, shard.copy, *shard.done);
  }
  shard.bytes = static_cast<int64_t>(param.shard.nbytes());
  shard.version = version_of(param.shard);
  shard.place = Place::leaving;
  free_departed();
}

void OffloadEngine::reload_param(int64_t id) {
  Param& param = registry_.at(id);
  const auto known = shards_.find(id);
  if (known == shards_.end() || known->second.place == Place::device) return;
  Shard& shard = known->second;
  if (shard.place == Place::host) {
    const PlainTensors plain;
    const auto bytes = static_cast<size_t>(shard.bytes);
    allocate_with_retry(give_back_, [&] { reallocate(param.shard.storage(), bytes, device_); });
    copy_in(param.shard, shard.copy, *shard.done);
    shard.version = version_of(param.shard);
  }
  shard.place = Place::device;
  param.arriving = shard.done;
}

void OffloadEngine::free_shard(int64_t id, Shard& shard) {
  shard.done->block(current_stream(device_));
  reallocate(registry_.at(id).shard.storage(), 0, device_);
  shard.place = Place::host;
}

void OffloadEngine::free_departed() {
  for (auto& [id, shard] : shards_) {
    if (shard.place == Place::leaving && shard.done->reached()) free_shard(id, shard);
  }
}

void OffloadEngine::settle() {
  for (auto& [id, shard] : shards_) {
    if (shard.place == Place::leaving) free_shard(id, shard);
    if (shard.place == Place::device) shard.done->block(current_stream(device_));
  }
}

void OffloadEngine::invalidate() {
  for (auto& [id, shard] : shards_) {
    if (shard.place == Place::device) shard.version.reset();
  }
}

void OffloadEngine::reset() {
  for (auto& [id, entry] : entries_) entry.done.block(current_stream(device_));
  entries_.clear();
  for (auto& [id, shard] : shards_) reload_param(id);
  settle();
}

void OffloadEngine::clear() {
  entries_.clear();
  shards_.clear();
}

void OffloadEngine::free_unused() {
  pool_->free_unused();
  short_ = false;
}

}  // namespace ldc

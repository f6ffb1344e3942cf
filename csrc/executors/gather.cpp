#include "executors/gather.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "base/range.h"
#include "memory/host_shards.h"

namespace ldc {

GatherEngine::GatherEngine(Device device, std::shared_ptr<Communicator> communicator, Registry& registry, Stats& stats,
                           const RuntimeOptions& options)
    : device_(device),
      communicator_(std::move(communicator)),
      registry_(registry),
      stats_(stats),
      sync_before_(options.sync_before_allgather),
      sync_after_(options.sync_after_allgather),
      stream_(pool_stream(device, /*high_priority=*/true)),
      copies_(pool_stream(device, /*high_priority=*/true)),
      arena_(device) {
  if (options.symmetric_threshold == 0 || !communicator_->has_windows()) return;
  windows_ = std::make_shared<Windows>(
      device, options.symmetric_threshold, [wire = communicator_](int64_t bytes) { return wire->make_window(bytes); },
      [wire = communicator_](const Tensor& window) { wire->drop_window(window); });
}

void GatherEngine::select(const Ids& ids, const std::vector<Dtype>& dtypes, std::vector<Param*>& params,
                          std::vector<ScalarType>& targets) {
  for (size_t i = 0; i < ids.size(); ++i) {
    Param& param = registry_.at(ids[i]);
    const ScalarType target = (dtypes.empty() ? Dtype{} : dtypes[i]).value_or(param.shard.scalar_type());
    Dtype present;
    if (const auto known = gathered_.find(param.id); known != gathered_.end()) {
      present = known->second.full.scalar_type();
    } else if (const auto twin = std::find(params.begin(), params.end(), &param); twin != params.end()) {
      present = targets[twin - params.begin()];
    }
    if (!present) {
      LDC_CHECK(param.shard.numel() == 0 || param.shard.storage().nbytes() > 0, "the memory of parameter '",
                param.name, "'s shard was freed; it is needed for a gather. Call reload_parameter if it was offloaded.");
      params.push_back(&param);
      targets.push_back(target);
      continue;
    }
    LDC_CHECK(*present == target, "parameter '", param.name, "' is asked for as ", target, " but is gathered as ",
              *present, ". Release it first, or gather it with one dtype throughout.");
    ++stats_.gather_hits;
  }
}

std::vector<Tensor> GatherEngine::fetch_shards(const std::vector<Param*>& params, Arena::Lease& fetched) {
  std::vector<Tensor> shards, hosts;
  std::vector<size_t> away;  // those that live in host memory
  std::vector<CopyKind> kinds;
  for (size_t i = 0; i < params.size(); ++i) {
    shards.push_back(params[i]->shard);
    if (!params[i]->host.defined() || shards[i].numel() == 0) continue;
    away.push_back(i);
    hosts.push_back(params[i]->host);
    kinds.push_back({params[i]->host.scalar_type()});
  }
  if (hosts.empty()) return shards;

  int64_t bytes = 0;
  const std::vector<Run> runs = neighbour_runs(hosts, kinds, bytes);
  // The last slot is held while this one is taken, so they are two that take turns; and it is given back before
  // anything of this group is queued on the gather stream, so that its next user waits for its own gather alone.
  fetched = arena_.acquire(bytes, copies_);
  release_fetched();
  {
    const Detour detour(copies_);
    for (const Run& run : runs) {
      if (!dry_) run.in(fetched->bytes).copy_(run.over(hosts[run.members[0]]), /*non_blocking=*/true);
      for (const size_t member : run.members) shards[away[member]] = run.in(fetched->bytes, hosts[member]);
    }
  }
  order(compute_, copies_, stream_);
  fetched->user = stream_;
  if (!dry_) stats_.fetched_bytes += bytes;
  return shards;
}

void GatherEngine::release_fetched() {
  if (fetched_) arena_.release(std::move(fetched_), stream_);
}

void GatherEngine::launch(const Ids& ids, const std::vector<Dtype>& dtypes) {
  std::vector<Param*> params;
  std::vector<ScalarType> targets;
  select(ids, dtypes, params, targets);
  if (shares_) share(params, targets);
  if (params.empty()) return;

  const PlainTensors plain;
  if (sync_before_) synchronize_device(device_);
  std::vector<int64_t> starts;
  int64_t bytes = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    starts.push_back(append(bytes, params[i]->shard.numel() * communicator_->world_size() * item_size(targets[i])));
  }
  auto group = std::make_shared<Group>();
  std::unique_ptr<Windows::Use> window;
  if (windows_) window = windows_->take(bytes, stream_);
  group->slot = window ? arena_.over(std::move(window), stream_) : arena_.acquire(bytes, stream_);
  if (refresh_) {
    order(compute_, current_stream(device_), stream_);
    order(compute_, current_stream(device_), copies_);
  }
  refresh_ = false;
  for (const Param* param : params) {
    if (param->arriving) param->arriving->block(stream_);
  }

  const std::vector<Tensor> inputs = fetch_shards(params, group->fetched);
  std::vector<Transfer> transfers;
  std::vector<Tensor> views;
  for (size_t i = 0; i < params.size(); ++i) {
    const Param& param = *params[i];
    const int64_t padded = param.shard.numel() * communicator_->world_size();
    transfers.push_back({typed_view(group->slot->bytes, starts[i], {padded}, targets[i]), inputs[i], param.name});
    views.push_back(typed_view(group->slot->bytes, starts[i], param.shape, targets[i]));
  }
  const bool symmetric = group->slot->window != nullptr;  // copy engines of other ranks read from there
  std::vector<Copy> copies;
  if (!dry_) copies = place_shards(transfers, symmetric);
  {
    const Detour detour(stream_);
    const Range range([&] { return "deepcompile: gather of " + Communicator::names(transfers); });
    if (!dry_) {
      copy_all(copies);
      group->completion = communicator_->all_gather(transfers);
      stats_.symmetric_gathers += symmetric ? 1 : 0;
    }
    if (has_streams(device_)) {
      group->completion.wait();  // in stream order: the gather stream waits, not this thread
      group->slot->ready.record(stream_);
    }
  }
  if (group->fetched && has_streams(device_)) fetched_ = std::move(group->fetched);

  for (size_t i = 0; i < params.size(); ++i) gathered_.emplace(params[i]->id, Gathered{group, std::move(views[i])});
  group->resident = static_cast<int64_t>(params.size());
  group->number = ++launched_;
  if (sync_after_) {
    complete(*group);
    synchronize_device(device_);
  }
  if (dry_) return;
  stats_.gathers += group->resident;
  stats_.gather_groups += 1;
  stats_.gathered_bytes += bytes;
}

std::vector<Copy> GatherEngine::place_shards(std::vector<Transfer>& transfers, bool all) const {
  std::vector<Copy> copies;
  for (Transfer& transfer : transfers) {
    const int64_t size = transfer.in.numel();
    const ScalarType dtype = transfer.out.scalar_type();
    if (size == 0 || (!all && transfer.in.scalar_type() == dtype)) continue;
    const int64_t begin = transfer.out.storage_offset() + communicator_->rank() * size;
    Tensor part = typed_view(transfer.out, begin * item_size(dtype), {size}, dtype);
    copies.push_back({part, std::exchange(transfer.in, part)});
  }
  return copies;
}

void GatherEngine::share(std::vector<Param*>& params, std::vector<ScalarType>& targets) {
  auto group = std::make_shared<Group>();
  group->waited = true;
  group->number = ++launched_;
  size_t left = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    Param& param = *params[i];
    if (param.shard.scalar_type() == targets[i] && !param.host.defined() && !param.arriving) {
      gathered_.emplace(param.id, Gathered{group, param.shard.view(param.shape)});
      group->resident += 1;
    } else {
      params[left] = params[i];
      targets[left++] = targets[i];
    }
  }
  params.resize(left);
  targets.resize(left);
  stats_.gathers += group->resident;
  stats_.gather_groups += group->resident > 0 ? 1 : 0;
}

const GatherEngine::Gathered& GatherEngine::launched(int64_t id) const {
  const auto found = gathered_.find(id);
  LDC_CHECK(found != gathered_.end(), "parameter '", registry_.at(id).name,
            "' is not gathered. allgather_param or prefetch_params_fused must come before, and its release after.");
  return found->second;
}

Tensor GatherEngine::placeholder(int64_t id) {
  const PlainTensors plain;
  const Tensor& full = launched(id).full;
  const bool has_nan = full.is_floating_point() || full.is_complex();
  const double value = has_nan ? std::numeric_limits<double>::quiet_NaN() : 0;
  return allocate_with_retry(give_back_, [&] { return at::full({}, value, full.options()); }).expand(full.sizes());
}

Tensor GatherEngine::wait(int64_t id) {
  const Gathered& gathered = launched(id);
  complete(*gathered.group);
  if (gathered.group->away.defined()) bring_back(*gathered.group);
  return gathered.full;
}

Tensor GatherEngine::copy(int64_t id) {
  const PlainTensors plain;
  return allocate_with_retry(give_back_, [&] { return wait(id).clone(); });  // a retry may send it away
}

void GatherEngine::complete(Group& group) {
  if (group.waited) return;
  group.completion.wait();
  group.slot->ready.block(current_stream(device_));
  group.slot->user = current_stream(device_);
  if (group.fetched) arena_.release(std::move(group.fetched), stream_);
  group.waited = true;
}

void GatherEngine::release_entry(std::unordered_map<int64_t, Gathered>::iterator entry) {
  const auto group = std::move(entry->second.group);
  gathered_.erase(entry);
  if (--group->resident > 0) return;
  complete(*group);  // a gather that nobody waited for may still be writing
  if (group->slot) arena_.release(std::move(group->slot), current_stream(device_));
}

void GatherEngine::retry_with(const GiveBack& give_back) {
  give_back_ = give_back;
  arena_.retry_with(give_back);
}

void GatherEngine::release(int64_t id) {
  const auto entry = gathered_.find(id);
  if (entry == gathered_.end()) return;
  if (registry_.at(id).persistent) return;
  release_entry(entry);
  // With prefetching this is the end of a pass, where the largest gradients are made: they can have the memory.
  if (!gathered_.empty()) return;
  release_fetched();
  arena_.free_unused();
}

void GatherEngine::keep(int64_t id) {
  if (const auto entry = gathered_.find(id); entry != gathered_.end()) entry->second.kept = true;
}

std::vector<GatherEngine::Request> GatherEngine::kept_groups() const {
  std::map<int64_t, Ids> groups;
  for (const auto& [id, gathered] : gathered_) {
    if (gathered.kept || registry_.at(id).persistent) groups[gathered.group->number].push_back(id);
  }
  std::vector<Request> requests;
  for (auto& [number, ids] : groups) {
    std::sort(ids.begin(), ids.end());
    std::vector<Dtype> dtypes;
    for (const int64_t id : ids) dtypes.push_back(gathered_.at(id).full.scalar_type());
    requests.push_back({std::move(ids), std::move(dtypes)});
  }
  return requests;
}

void GatherEngine::invalidate() {
  refresh_ = true;
  release_fetched();
  if (gathered_.empty()) return;  // a second call in a row must not forget what the first one remembered
  refetch_ = kept_groups();
  while (!gathered_.empty()) release_entry(gathered_.begin());
  arena_.free_unused();  // what is gathered next may need slots of other sizes
}

void GatherEngine::order_behind_current_stream() { refresh_ = true; }

void GatherEngine::invalidate(int64_t id) {
  refresh_ = true;
  if (const auto entry = gathered_.find(id); entry != gathered_.end()) release_entry(entry);
}

void GatherEngine::refetch() {
  if (left_to_graphs_) return forget_kept();
  for (Request& request : std::exchange(refetch_, {})) {
    Request absent;
    for (size_t i = 0; i < request.ids.size(); ++i) {
      if (gathered_.contains(request.ids[i])) continue;
      absent.ids.push_back(request.ids[i]);
      absent.dtypes.push_back(request.dtypes[i]);
    }
    launch(absent.ids, absent.dtypes);
  }
}

void GatherEngine::order_behind_gathers(const Stream& stream) {
  if (has_streams(device_)) return order(compute_, stream_, stream);
  for (const auto& [id, gathered] : gathered_) complete(*gathered.group);
}

bool GatherEngine::owns(const c10::Storage& storage) const {
  // By address, as wait_allgather gives out the slot's memory in a storage of its own.
  return std::any_of(gathered_.begin(), gathered_.end(), [&](const auto& entry) {
    const Arena::Lease& slot = entry.second.group->slot;
    return slot && storage.data() != nullptr && slot->bytes.storage().data() == storage.data();
  });
}

void GatherEngine::set_dry(bool dry) {
  if (dry == dry_) return;
  invalidate();
  forget_kept();
  dry_ = dry;
}

Tensor GatherEngine::gather_now(const Tensor& shard, Shape size, ScalarType dtype, std::string_view name) {
  const PlainTensors plain;
  const int64_t world = communicator_->world_size();
  const auto rows = row_shard_shape(size, world), flat = flat_shard_shape(size, world);
  LDC_CHECK_ARG(shard.device() == device_ && (shard.sizes() == Shape(rows) || shard.sizes() == Shape(flat)),
                "gather: parameter '", name, "' of size ", size, " over ", world, " ranks needs a shard of shape ",
                Shape(rows), " or ", Shape(flat), " on ", device_, ", got ", shard.sizes(), " on ", shard.device(), ".");

  LDC_CHECK(shard.numel() == 0 || shard.storage().nbytes() > 0, "the memory of parameter '", name,
            "'s shard was freed; it is needed for a gather.");
  // Cast and output come from the compute stream's pool and go back to it only after the compute stream has waited.
  const Tensor host = host_of(shard);
  Tensor input = shard.detach();
  if (host.defined()) {
    input = allocate_with_retry(give_back_, [&] { return at::empty(host.sizes(), host.options().device(device_)); });
    input.copy_(host, /*non_blocking=*/true);
  }
  input = allocate_with_retry(give_back_, [&] { return input.to(dtype).contiguous(); });
  Tensor full = allocate_with_retry(give_back_, [&] { return at::empty({input.numel() * world}, input.options()); });
  if (dry_) return typed_view(full, 0, size, dtype);
  const Stream compute = current_stream(device_);
  order(compute_, compute, stream_);
  {
    const Detour detour(stream_);
    communicator_->all_gather({{full, input, name}}).wait();
  }
  order(compute_, stream_, compute);
  stats_.gathers += 1;
  stats_.gather_groups += 1;
  stats_.gathered_bytes += static_cast<int64_t>(full.nbytes());
  return typed_view(full, 0, size, dtype);
}

void GatherEngine::clear() {
  gathered_.clear();
  refetch_.clear();
  fetched_.reset();
  arena_.free_unused();
}

}  // namespace ldc

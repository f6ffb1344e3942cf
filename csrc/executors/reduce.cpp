#include "executors/reduce.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/range.h"
#include "memory/views.h"

namespace ldc {

namespace {

/// The gradient as it travels: contiguous, cast to `send`'s dtype, zero behind its end. Garbage there would end in the
/// padding of the last ranks' gradients, and from there in the gradient norm.
void fill_send_buffer(const Tensor& send, const Tensor& grad) {
  const int64_t count = grad.numel();
  send.narrow(0, 0, count).view(grad.sizes()).copy_(grad);
  if (count < send.numel()) send.narrow(0, count, send.numel() - count).zero_();
}

}  // namespace

struct ReduceEngine::Plan {
  std::vector<int64_t> sends;  // byte offsets into the slot; -1 where no buffer is needed
  std::vector<size_t> staged;  // parameters whose result goes through staging
  std::vector<Run> runs;       // over the gradients of these
  int64_t bytes = 0;
};

ReduceEngine::ReduceEngine(Device device, std::shared_ptr<Communicator> communicator, Registry& registry, Stats& stats,
                           const RuntimeOptions& options)
    : device_(device),
      communicator_(std::move(communicator)),
      registry_(registry),
      stats_(stats),
      window_(static_cast<size_t>(options.reduce_window)),
      bucket_size_(options.reduce_bucket_size),
      sync_before_(options.sync_before_reduce),
      sync_after_(options.sync_after_reduce),
      stream_(pool_stream(device, /*high_priority=*/true)),
      result_stream_(communicator_->reduces_in_two_stages() ? pool_stream(device, /*high_priority=*/true) : stream_),
      arena_(device),
      merge_(make_gradient_merge(device)) {}

void ReduceEngine::check(const Param& param, const Tensor& grad) const {
  LDC_CHECK_ARG(param.grad.defined(), "reduce_grad: '", param.name,
                "' was registered without a gradient buffer (frozen).");
  LDC_CHECK_ARG(grad.defined() && grad.device() == device_ && grad.sizes() == Shape(param.shape) &&
                    (grad.is_floating_point() || grad.is_complex()),
                "reduce_grad: '", param.name, "' needs a floating gradient of shape ", Shape(param.shape), " on ",
                device_, ", got ",
                grad.defined() ? c10::str(grad.scalar_type(), " of shape ", grad.sizes(), " on ", grad.device())
                               : std::string("None"),
                ".");
}

std::vector<Gradient> ReduceEngine::gradients(const Ids& ids, const std::vector<Tensor>& grads) {
  LDC_CHECK_ARG(ids.size() == grads.size(), "reduce_grads_fused: ", ids.size(), " ids but ", grads.size(),
                " gradients.");
  std::vector<Gradient> gradients;
  gradients.reserve(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    Param& param = registry_.at(ids[i]);
    check(param, grads[i]);
    gradients.push_back({&param, grads[i], param.reduce_dtype.value_or(grads[i].scalar_type())});
  }
  return gradients;
}

void ReduceEngine::hold(const Ids& ids, const std::vector<Tensor>& grads) {
  const std::vector<Gradient> group = gradients(ids, grads);
  if (!dry_) held_.add(group, give_back_);
}

void ReduceEngine::reduce_held(const Ids& ids) { reduce(held_.take(ids)); }

void ReduceEngine::collect(int64_t id, const Tensor& grad) {
  Gradient gradient = gradients({id}, {grad})[0];
  if (dry_) return;
  gradient = held_.complete(std::move(gradient));
  if (gradient.value.is_same(grad)) {  // else it is a sum, which belongs to this engine
    const PlainTensors plain;
    // As it travels, so that it is not copied again.
    gradient.value = allocate_with_retry(give_back_, [&] {
      return grad.detach().to(gradient.wire, /*non_blocking=*/false, /*copy=*/true, c10::MemoryFormat::Contiguous);
    });
  }
  const int64_t elements = gradient.param->shard.numel() * communicator_->world_size();
  if (bucket_elements_ + elements > bucket_size_) flush();
  if (elements >= bucket_size_) return reduce({std::move(gradient)});
  bucket_.push_back(std::move(gradient));
  bucket_elements_ += elements;
}

void ReduceEngine::flush() {
  bucket_elements_ = 0;
  reduce(std::exchange(bucket_, {}));
}

void ReduceEngine::reduce(const Ids& ids, const std::vector<Tensor>& grads) {
  std::vector<Gradient> group = gradients(ids, grads);
  if (dry_) return;
  for (Gradient& gradient : group) gradient = held_.complete(std::move(gradient));
  // Contributions to one parameter add up in the order of the calls.
  const auto waits = [&](const Gradient& waiting) {
    return std::any_of(group.begin(), group.end(), [&](const Gradient& g) { return g.param == waiting.param; });
  };
  if (std::any_of(bucket_.begin(), bucket_.end(), waits)) flush();
  reduce(std::move(group));
}

void ReduceEngine::reduce(std::vector<Gradient> gradients) {
  std::vector<Gradient> group;
  int64_t copied = 0;
  const auto send = [&] {
    if (!group.empty()) reduce_group(group);
    group.clear();
    copied = 0;
  };
  for (Gradient& gradient : gradients) {
    const int64_t copies = travels_as_is(gradient) ? 0 : gradient.param->shard.numel() * communicator_->world_size();
    const bool again =  // must add to its own first result: in another group
        std::any_of(group.begin(), group.end(), [&](const Gradient& g) { return g.param == gradient.param; });
    if (again || (bucket_size_ > 0 && copied + copies > bucket_size_)) send();
    copied += copies;
    group.push_back(std::move(gradient));
  }
  send();
}

bool ReduceEngine::travels_as_is(const Gradient& gradient) const {
  return gradient.param->even(communicator_->world_size()) && gradient.value.scalar_type() == gradient.wire &&
         gradient.value.is_contiguous();
}

ReduceEngine::Plan ReduceEngine::make_plan(const std::vector<Gradient>& group) const {
  Plan plan;
  std::vector<Tensor> targets;
  std::vector<CopyKind> kinds;
  for (size_t i = 0; i < group.size(); ++i) {
    const Param& param = *group[i].param;
    const ScalarType wire = group[i].wire;
    const bool empty = param.grad.numel() == 0;  // nothing travels
    plan.sends.push_back(empty || travels_as_is(group[i])
                             ? -1
                             : append(plan.bytes,
                                      param.grad.numel() * communicator_->world_size() * item_size(wire)));
    if (empty || communicator_->is_alone() || (param.grad.scalar_type() == wire && !param.has_grad)) continue;
    plan.staged.push_back(i);
    targets.push_back(param.grad);
    kinds.push_back({wire, param.has_grad});
  }
  // A run is written as a whole: it must not pass over the gradient of a parameter that is not reduced here.
  const auto is_free = [this](const c10::Storage& storage, int64_t begin, int64_t end) {
    return registry_.is_free(storage, begin, end);
  };
  plan.runs = neighbour_runs(targets, kinds, plan.bytes, is_free);
  return plan;
}

void ReduceEngine::reduce_group(const std::vector<Gradient>& group) {
  const PlainTensors plain;
  if (sync_before_) synchronize_device(device_);
  // Before anything is allocated for this group: compute waits for the oldest here in any case, and its memory is free.
  while (!pending_.empty() && pending_.size() >= window_) pop();
  for (const Gradient& gradient : group) {
    allocate_with_retry(give_back_, [&] { registry_.allocate_grad(*gradient.param); });
  }
  const Plan plan = make_plan(group);

  Pending pending;
  if (!spare_events_.empty()) {
    pending.done = std::move(spare_events_.back());
    spare_events_.pop_back();
  }
  order(compute_, current_stream(device_), stream_);
  if (plan.bytes > 0) pending.buffers = arena_.acquire(plan.bytes, stream_);

  std::vector<Tensor> results;
  for (const Gradient& gradient : group) results.push_back(gradient.param->grad);
  for (const Run& run : plan.runs) {
    const Tensor& buffer = pending.buffers->bytes;
    const Tensor& first = results[plan.staged[run.members[0]]];
    pending.merges.push_back({run.over(first), run.in(buffer), run.kind.add});
    for (const size_t member : run.members) {
      Tensor& result = results[plan.staged[member]];
      result = run.in(buffer, result);
    }
  }
  int64_t sent = 0;
  std::vector<Transfer> transfers;
  for (size_t i = 0; i < group.size(); ++i) {
    const Param& param = *group[i].param;
    Tensor send = group[i].value.detach();
    if (plan.sends[i] >= 0) {
      const int64_t padded = param.shard.numel() * communicator_->world_size();
      send = typed_view(pending.buffers->bytes, plan.sends[i], {padded}, group[i].wire);
    }
    sent += static_cast<int64_t>(send.nbytes());
    transfers.push_back({results[i], send, param.name});
  }
  {
    const Detour detour(stream_);
    const Range range([&] { return "deepcompile: reduction of " + Communicator::names(transfers); });
    for (size_t i = 0; i < group.size(); ++i) {
      if (plan.sends[i] < 0) continue;
      fill_send_buffer(transfers[i].in, group[i].value.detach());
      stats_.copied_grads += 1;
    }
    if (communicator_->is_alone()) {
      for (size_t i = 0; i < group.size(); ++i) {
        if (transfers[i].in.numel() == 0) continue;
        pending.merges.push_back({flat(transfers[i].out), flat(transfers[i].in), group[i].param->has_grad});
      }
    } else {
      pending.completion = communicator_->reduce_scatter_mean(transfers);
    }
    for (const Gradient& gradient : group) {
      pending.kept.push_back(gradient.value);
      gradient.param->has_grad = true;
    }
  }
  if (has_streams(device_)) {
    order(compute_, stream_, result_stream_);
    const Detour detour(result_stream_);
    finish(pending);
    pending.done.record(result_stream_);
    // The next group gets them in the order of one stream. With a second stream it would wait for the results of this
    // one, and a CPU backend uses them from its own threads: there they are released in pop().
    if (result_stream_ == stream_) release_buffers(pending);
  }
  pending_.push_back(std::move(pending));
  while (!pending_.empty() && (sync_after_ || window_ == 0)) pop();
  if (sync_after_) synchronize_device(device_);

  stats_.reductions += static_cast<int64_t>(group.size());
  stats_.reduce_groups += 1;
  stats_.reduced_bytes += sent;
}

void ReduceEngine::release_buffers(Pending& pending) {
  if (pending.buffers) arena_.release(std::move(pending.buffers), result_stream_);
}

void ReduceEngine::finish(Pending& pending) {
  pending.completion.wait();
  merge_->merge(pending.merges);
  pending.merges.clear();
}

void ReduceEngine::pop() {
  const PlainTensors plain;
  Pending oldest = std::move(pending_.front());
  pending_.pop_front();
  if (has_streams(device_)) {
    oldest.done.block(current_stream(device_));
    spare_events_.push_back(std::move(oldest.done));
  } else {
    finish(oldest);
  }
  release_buffers(oldest);
}

int64_t ReduceEngine::give_back() {
  int64_t freed = 0;
  while (!pending_.empty()) {
    for (const Tensor& gradient : pending_.front().kept) freed += static_cast<int64_t>(gradient.nbytes());
    pop();
  }
  return freed + arena_.free_unused();
}

void ReduceEngine::retry_with(const GiveBack& give_back) {
  give_back_ = give_back;
  arena_.retry_with(give_back);
}

bool ReduceEngine::owns(const c10::Storage& storage) const {
  return std::any_of(pending_.begin(), pending_.end(), [&](const Pending& pending) {
    return std::any_of(pending.kept.begin(), pending.kept.end(),
                       [&](const Tensor& gradient) { return gradient.storage().is_alias_of(storage); });
  });
}

void ReduceEngine::drain() {
  try {
    flush();
    while (!pending_.empty()) pop();
  } catch (...) {
    drop_pending();  // their sums are void too
    throw;
  }
}

/// The wire keeps alive what its own threads still write.
void ReduceEngine::drop_pending() {
  if (pending_.empty()) return;
  try {
    order_behind_reductions(current_stream(device_));
  } catch (const std::exception& error) {
    TORCH_WARN_ONCE("lightning_deepcompile: gradients stay allocated, as nobody knows whether the device is done with "
                    "them: ", message_of(error));
    for (Pending& pending : pending_) {
      for (Tensor& gradient : pending.kept) static_cast<void>(gradient.unsafeReleaseTensorImpl());
    }
  }
  pending_.clear();
}

void ReduceEngine::reset() noexcept {
  bucket_.clear();
  bucket_elements_ = 0;
  held_.clear();
  try {
    drain();
  } catch (const std::exception& error) {
    TORCH_WARN("lightning_deepcompile: dropped gradients whose reduction had failed: ", message_of(error));
  }
}

void ReduceEngine::start_accumulation(const Ids& ids) {
  drain();  // what a backward that failed half-way left behind
  for (const int64_t id : ids) registry_.at(id).has_grad = false;
}

void ReduceEngine::forget(int64_t id) {
  start_accumulation({id});
  held_.forget({id});
}

Ids ReduceEngine::ids_with_grad() const {
  Ids ids;
  for (const auto& [id, param] : registry_.params()) {
    if (param.has_grad) ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  return ids;
}

void ReduceEngine::free_grads(const Ids& ids) {
  drain();  // the memory goes back to the compute stream's pool, so that stream must be behind the last write
  for (const int64_t id : ids) registry_.at(id).has_grad = false;
  held_.forget(ids);
  registry_.free_unused_grads(ids);
}

Tensor ReduceEngine::reduce_now(const Tensor& grad, Shape shard_size, ScalarType dtype, Dtype wire,
                                std::string_view name) {
  const PlainTensors plain;
  const int64_t world = communicator_->world_size();
  const auto rows = row_shard_shape(grad.sizes(), world), flat_shape = flat_shard_shape(grad.sizes(), world);
  LDC_CHECK_ARG(grad.device() == device_ && (shard_size == Shape(rows) || shard_size == Shape(flat_shape)),
                "reduce: a gradient of shape ", grad.sizes(), " of '", name, "' over ", world,
                " ranks gives a shard of shape ", Shape(rows), " or ", Shape(flat_shape), " on ", device_,
                ", asked for ", shard_size, " from a gradient on ", grad.device(), ".");
  const ScalarType travels_as = wire.value_or(grad.scalar_type());

  // All buffers come from the compute stream's pool and go back to it only after the compute stream has waited.
  const auto retried = [this](const auto& allocate) { return allocate_with_retry(give_back_, allocate); };
  Tensor send = retried([&] { return grad.detach().to(travels_as).contiguous(); });
  const Tensor shard = retried([&] { return at::empty(shard_size, send.options()); });
  const auto result = [&] { return retried([&] { return shard.to(dtype); }); };
  if (dry_) return result();
  if (shard.numel() * world != send.numel()) {
    const Tensor padded = retried([&] { return at::empty({shard.numel() * world}, send.options()); });
    fill_send_buffer(padded, send);
    send = padded;
  }
  const Stream compute = current_stream(device_);
  order(compute_, compute, stream_);
  {
    const Detour detour(stream_);
    communicator_->reduce_scatter_mean({{shard, send, name}}).wait();
  }
  order(compute_, stream_, compute);
  stats_.reductions += 1;
  stats_.reduce_groups += 1;
  stats_.reduced_bytes += static_cast<int64_t>(send.nbytes());
  return result();
}

void ReduceEngine::order_behind_reductions(const Stream& stream) {
  order(compute_, stream_, stream);
  order(compute_, result_stream_, stream);
}

void ReduceEngine::fork() {
  order(compute_, current_stream(device_), stream_);
  order(compute_, current_stream(device_), result_stream_);
}

void ReduceEngine::join() {
  LDC_CHECK(bucket_.empty(), "a program that is recorded ends with single gradients that were not reduced.");
  drain();
  order_behind_reductions(current_stream(device_));
  arena_.free_unused();
}

void ReduceEngine::cancel() {
  pending_.clear();
  bucket_.clear();
  bucket_elements_ = 0;
  arena_.drop_unused();
}

void ReduceEngine::clear() {
  drop_pending();
  bucket_.clear();
  bucket_elements_ = 0;
  held_.clear();
  arena_.free_unused();
}

}  // namespace ldc

// On a device with streams, every order that gathers, reductions and offloading promise in their headers; and, where
// they promise it, no order: what communicates runs beside what computes.
//
// Fresh memory orders its user behind the compute stream by itself (Arena::acquire). So each order is looked at where
// nothing else could make it: with slots that have been used before, and with as few waits as the call allows.
#include "executors/recorder.h"
#include "executors/state_copies.h"
#include "fake_streams.h"
#include "memory/host_shards.h"

namespace ldc::testing {
namespace {

void test_gathers() {
  Streams streams;
  GatherEngine& gathers = streams.gathers;
  Work& last = streams.wire->last;
  const Work made = streams.compute();
  gathers.launch({0}, {});
  EXPECT(last.stream == streams.gathering && last.is_behind(made));
  const Work first = last;
  gathers.launch({1}, {});
  EXPECT(!streams.compute_waits_for(first));
  gathers.wait(0);
  EXPECT(streams.compute_waits_for(first) && !streams.compute_waits_for(last));
  gathers.wait(1);

  const Work read = streams.compute();
  gathers.release(1);  // its slot is free, and 0 keeps the arena from giving it away
  const Work beside = streams.compute();
  gathers.launch({2}, {});
  EXPECT(last.is_behind(read) && !last.is_behind(beside));

  gathers.wait(2);
  gathers.release(2);
  Work written = streams.compute();
  gathers.order_behind_current_stream();
  gathers.launch({2}, {});
  EXPECT(last.is_behind(written));
  gathers.release(2);
  EXPECT(streams.compute_waits_for(last));  // nobody has waited, and the slot is somebody else's next
  written = streams.compute();
  gathers.invalidate(2);
  gathers.launch({2}, {});
  EXPECT(last.is_behind(written));
  written = streams.compute();
  gathers.invalidate();
  EXPECT(streams.compute_waits_for(last));
  gathers.launch({0}, {});
  EXPECT(last.is_behind(written));
}

/// A window's next gather is behind the last use of what it held, and behind nothing else.
void test_gathers_to_windows() {
  RuntimeOptions options;
  options.symmetric_threshold = 1;
  Streams streams(options);
  GatherEngine& gathers = streams.gathers;
  Work& last = streams.wire->last;
  gathers.launch({0}, {});
  gathers.wait(0);
  const Work read = streams.compute();
  gathers.release(0);
  const Work beside = streams.compute();
  gathers.launch({1}, {});
  EXPECT(last.is_behind(read) && !last.is_behind(beside));
  EXPECT(streams.stats.symmetric_gathers == 2 && gathers.arena().bytes() == 0);
}

/// Copies of shards that live in host memory: two slots take turns.
void test_gathers_out_of_host_memory() {
  Streams streams;
  constexpr int64_t kRow = 512 * 1024;  // so large that gathers and copies do not share slots
  HostSlabs slabs(host_memory(), "shards", [] {});
  for (const int64_t id : {10, 11}) {
    const Tensor shard = place_host_shard(slabs, kRow, c10::kFloat, kCpu).fill_(1).view({1, kRow});
    streams.registry.add(id, c10::str("h", id), {2, kRow}, shard, {}, {}, false);
  }
  GatherEngine& gathers = streams.gathers;
  std::vector<Work> gathered;
  const auto round = [&](int64_t id) {
    const Work copied = streams.fake.queue(streams.fetching);
    gathers.launch({id}, {});
    gathered.push_back(streams.wire->last);
    EXPECT(gathered.back().is_behind(copied));
    gathers.wait(id);
    gathers.release(id);
  };
  gathers.launch({0}, {});  // keeps the arena from giving slots away
  const auto copies_wait_for = [&](const Work& work) { return streams.fake.is_behind(streams.fetching, work); };
  round(10);
  round(11);
  const Work beside = streams.compute();
  round(10);
  EXPECT(copies_wait_for(gathered[0]) && !copies_wait_for(gathered[1]) && !copies_wait_for(beside));
  const Work written = streams.compute();
  gathers.order_behind_current_stream();
  round(11);
  EXPECT(copies_wait_for(written) && streams.stats.fetched_bytes == 4 * 4 * kRow);
}

void test_reductions() {
  RuntimeOptions options;
  options.reduce_window = 2;
  Streams streams(options);
  ReduceEngine& reductions = streams.reductions;
  const Tensor grad = streams.fake.tensor(ones({4, 2}));
  std::vector<Work> reduced;
  const auto reduce = [&](int64_t id, const Tensor& value) {
    const Work written = streams.compute();
    reductions.reduce({id}, {value});
    reduced.push_back(streams.wire->last);
    EXPECT(reduced.back().stream == streams.reducing && reduced.back().is_behind(written));
  };
  reduce(0, grad);
  reduce(1, streams.fake.tensor(ones({4, 2})));
  EXPECT(!streams.compute_waits_for(reduced[0]) && reductions.owns(grad.storage()));
  reduce(2, streams.fake.tensor(ones({4, 2})));  // the window is full: the oldest group is over first
  EXPECT(streams.compute_waits_for(reduced[0]) && !reductions.owns(grad.storage()));
  EXPECT(!streams.compute_waits_for(reduced[1]));
  reductions.drain();
  EXPECT(streams.compute_waits_for(reduced[2]));
  reduce(0, grad);  // a second contribution, which is added on the reduce stream
  EXPECT(!streams.compute_waits_for(reduced.back()));
  EXPECT(reductions.give_back() > 0 && streams.compute_waits_for(reduced.back()));
  reduce(3, grad);
  reductions.start_accumulation({3});
  EXPECT(streams.compute_waits_for(reduced.back()));
}

void test_groups_of_tensors_that_leave() {
  Streams streams;
  OffloadEngine& offloads = streams.offloads;
  std::vector<Work>& copies = streams.fake.copies;
  const Tensor activation = streams.fake.tensor(ones({8}).mul_(3));
  const Work written = streams.compute();
  std::vector<Tensor> hosts = offloads.offload_group({activation});
  const Work left = copies.back();
  EXPECT(left.stream == streams.out && left.is_behind(written) && !streams.compute_waits_for(left));
  EXPECT(HostPool::buffer_of(hosts[0])->source.defined());  // its memory is not free
  offloads.wait_copies(hosts);
  EXPECT(streams.compute_waits_for(left) && !HostPool::buffer_of(hosts[0])->source.defined());

  hosts.clear();
  hosts = offloads.offload_group({activation});
  const void* address = hosts[0].const_data_ptr();
  const Work again = copies.back();
  const Work used = streams.compute();  // by whoever had the memory before that it comes back to
  Work arrives = streams.fake.queue(streams.in);
  const std::vector<Tensor> back = offloads.reload_group(hosts);
  EXPECT(streams.fake.is_behind(streams.in, again) && streams.fake.is_behind(streams.in, used));
  EXPECT(!streams.compute_waits_for(again) && !streams.compute_waits_for(arrives));
  offloads.wait_copies(hosts);
  EXPECT(streams.compute_waits_for(arrives) && back[0].eq(3).all().item<bool>());

  arrives = streams.fake.queue(streams.in);
  offloads.reload_group(hosts);
  hosts.clear();  // while it is still read
  EXPECT(!streams.compute_waits_for(arrives));
  hosts = offloads.offload_group({activation});
  EXPECT(hosts[0].const_data_ptr() == address && copies.back().is_behind(arrives));
}

void test_a_tensor_that_leaves() {
  Streams streams;
  OffloadEngine& offloads = streams.offloads;
  const Tensor tensor = streams.fake.tensor(ones({8}).mul_(3));
  const auto leave = [&] {
    const Work written = streams.compute();
    const Work left = streams.fake.queue(streams.out);
    const Tensor host = offloads.offload(tensor, 1);
    EXPECT(streams.fake.is_behind(streams.out, written) && !streams.compute_waits_for(left));
    return std::pair(host, left);
  };
  const auto come_back = [&](const Tensor& host, const Work& left) {
    const Work used = streams.compute();
    const Work arrives = streams.fake.queue(streams.in);
    offloads.reload(host, 1);
    EXPECT(streams.fake.is_behind(streams.in, left) && streams.fake.is_behind(streams.in, used));
    EXPECT(!streams.compute_waits_for(arrives));
    EXPECT(offloads.wait_reload(1).eq(3).all().item<bool>() && streams.compute_waits_for(arrives));
  };
  const auto [promised, first] = leave();
  come_back(promised, first);
  const auto [unread, second] = leave();
  const Tensor host = offloads.wait_offload(1);
  EXPECT(streams.compute_waits_for(second));
  come_back(host, second);
}

void test_a_shard_that_leaves() {
  Streams streams;
  Work& last = streams.wire->last;
  streams.gathers.launch({0, 1}, {});  // reads the shard
  const Work reads = last;
  Work left = streams.fake.queue(streams.out);
  streams.offloads.offload_param(0);
  EXPECT(streams.fake.is_behind(streams.out, reads));
  EXPECT(streams.compute_waits_for(left));  // the shard's memory has gone back to the compute stream's pool
  streams.gathers.wait(0);
  streams.gathers.release(0);
  streams.gathers.launch({2}, {});
  streams.gathers.launch({3}, {});
  streams.gathers.wait(3);
  streams.gathers.release(3);  // a slot for the next gather, which orders it behind nothing that follows
  const Work used = streams.compute();
  const Work arrives = streams.fake.queue(streams.in);
  streams.offloads.reload_param(0);
  EXPECT(streams.fake.is_behind(streams.in, left) && streams.fake.is_behind(streams.in, used));
  EXPECT(!streams.compute_waits_for(arrives));
  streams.gathers.launch({0}, {});
  EXPECT(last.is_behind(arrives) && !streams.compute_waits_for(arrives));
  left = streams.fake.queue(streams.out);
  streams.offloads.offload_param(0);  // again: what has not changed is not copied, and the gather comes first
  EXPECT(streams.fake.is_behind(streams.out, last) && streams.compute_waits_for(left));
  const Work back = streams.fake.queue(streams.in);
  streams.offloads.reload_param(0);
  EXPECT(!streams.compute_waits_for(back));
  streams.offloads.settle();
  EXPECT(streams.compute_waits_for(back));  // the optimizer writes to the shard
}

/// What a device graph records: it begins and ends on the compute stream, and waits for nothing from before.
void test_recordings() {
  Streams streams;
  const bool boundary = true;
  Recorder recorder(streams.registry, streams.gathers, streams.reductions, streams.stats, boundary);
  Work& last = streams.wire->last;
  const auto run = [&] {  // a forward program, which leaves a parameter for its backward program
    streams.gathers.launch({0, 1}, {});
    streams.gathers.launch({2}, {});
    streams.gathers.wait(0);
    streams.gathers.release(0);
    streams.gathers.release(1);
  };
  streams.gathers.launch({3}, {});
  const Work before = last;
  recorder.begin();
  recorder.prepare();
  EXPECT(streams.compute_waits_for(before) && !streams.gathers.is_gathered(3));
  const Work forked = streams.compute();
  recorder.fork();
  run();
  EXPECT(last.stream == streams.gathering && last.is_behind(forked) && !streams.compute_waits_for(last));
  const std::shared_ptr<Recording> forward = recorder.join();
  EXPECT(streams.compute_waits_for(last) && streams.gathers.is_gathered(2) && streams.stats.gathers == 1);
  const Tensor left = streams.gathers.wait(2);
  recorder.replayed(*forward);
  EXPECT(streams.stats.gathers == 1 + 3);
  EXPECT(!recorder.fits(*forward));  // it begins with nothing gathered

  recorder.prepare();  // of the backward program
  recorder.fork();
  EXPECT(streams.gathers.wait(2).is_same(left));
  streams.gathers.release(2);
  streams.reductions.reduce({0, 2}, {streams.fake.tensor(ones({4, 2})), streams.fake.tensor(ones({4, 2}))});
  EXPECT(!streams.compute_waits_for(last));
  const std::shared_ptr<Recording> backward = recorder.join();
  EXPECT(streams.compute_waits_for(last) && !streams.gathers.is_gathered(2));
  EXPECT(!recorder.fits(*backward) && !recorder.fits(*forward));  // the gradients of a step are there
  streams.reductions.free_grads({0, 2});
  EXPECT(recorder.fits(*forward) && !recorder.fits(*backward));
  recorder.replayed(*forward);
  EXPECT(recorder.fits(*backward) && streams.gathers.wait(2).is_same(left));
  recorder.replayed(*backward);
  EXPECT(!streams.gathers.is_gathered(2) && streams.reductions.ids_with_grad() == Ids({0, 2}));

  streams.reductions.free_grads({0, 2});
  EXPECT(streams.registry.at(0).grad.storage().nbytes() > 0);  // graphs write to it
  recorder.prepare();
  recorder.fork();
  run();
  recorder.cancel();
  EXPECT(!streams.gathers.is_gathered(2) && recorder.fits(*forward));
  streams.registry.replace_grad(0, at::zeros({2, 2}));
  EXPECT(!recorder.fits(*forward));
  recorder.forget();
  streams.reductions.free_grads({0, 2});
  EXPECT(streams.registry.at(0).grad.storage().nbytes() == 0);
}

/// An operation that fails may have been queued in part: compute waits for that, as what it drops is compute's.
void test_failures_are_waited_for() {
  Streams streams;
  GatherEngine& gathers = streams.gathers;
  ReduceEngine& reductions = streams.reductions;
  HostSlabs slabs(host_memory(), "shards", [] {});
  const Tensor shard = place_host_shard(slabs, 4, c10::kFloat, kCpu).fill_(1).view({2, 2});
  streams.registry.add(4, "h", {4, 2}, shard, {}, {}, false);
  const Tensor grad = streams.fake.tensor(ones({4, 2}));
  const auto fails = [&](const auto& call) {
    streams.wire->last = {};
    streams.wire->broken = true;
    EXPECT(refuses("the wire is cut", call));
    streams.wire->broken = false;
    EXPECT(streams.wire->last.point > 0 && streams.compute_waits_for(streams.wire->last));
    EXPECT(gathers.arena().bytes() == 0 && reductions.arena().bytes() == 0 && !reductions.owns(grad.storage()));
  };
  fails([&] { gathers.launch({0, 1}, {}); });
  const Work fetched = streams.fake.queue(streams.fetching);
  fails([&] { gathers.launch({4}, {}); });
  EXPECT(streams.compute_waits_for(fetched) && !gathers.is_gathered(0));
  fails([&] { gathers.gather_now(streams.fake.tensor(ones({2, 2})), {4, 2}, c10::kFloat, "w"); });
  fails([&] { reductions.reduce({0, 1}, {grad, grad}); });
  fails([&] { reductions.reduce({0}, {streams.fake.tensor(ones({2, 4}).t())}); });  // has a buffer
  fails([&] { reductions.reduce_now(grad, {2, 2}, c10::kFloat, {}, "w"); });
}

/// Slots and copies that an exception drops.
void test_what_is_dropped_is_waited_for() {
  Streams streams;
  Arena arena(streams.fake.device());
  const Stream side = pool_stream(streams.fake.device(), false);
  for (const bool used_before : {false, true}) {
    Arena::Lease slot = arena.acquire(100, side);
    const Work written = streams.fake.queue(side.id());
    if (used_before) {
      arena.release(std::move(slot), side);
      EXPECT(!streams.compute_waits_for(written));
      slot = arena.acquire(100, side);
    }
    const Work again = streams.fake.queue(side.id());
    slot.reset();
    EXPECT(streams.compute_waits_for(again) && arena.bytes() == 0);
  }
  StateCopies states(streams.fake.device(), streams.stats, host_memory());
  const c10::StreamId out = streams.fake.made - 1;
  const std::vector<Tensor> buffers{states.host_buffer(ones({8})), states.host_buffer(ones({9}))};
  const Tensor state = streams.fake.tensor(ones({8}));
  const Work left = streams.fake.queue(out);
  EXPECT(refuses("size", [&] { states.stow(0, {state, state}, buffers); }));
  EXPECT(streams.compute_waits_for(left));
}

}  // namespace

void test_stream_order() {
  test_recordings();
  test_gathers();
  test_gathers_to_windows();
  test_gathers_out_of_host_memory();
  test_reductions();
  test_groups_of_tensors_that_leave();
  test_a_tensor_that_leaves();
  test_a_shard_that_leaves();
  test_failures_are_waited_for();
  test_what_is_dropped_is_waited_for();
  // Memory of the device is taken, and what is given back for it is waited for, on the compute stream alone.
  const std::vector<c10::StreamId>& taken = FakeDevice::instance().allocations;
  EXPECT(!taken.empty() && std::all_of(taken.begin(), taken.end(), [](c10::StreamId on) { return on == kCompute; }));
}

}  // namespace ldc::testing

// The parts of the runtime without torch processes: layouts, buffers, buckets, use counts, faults. Run by sanitize.py.
#include "support.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>

#include <cstdlib>
#include <thread>

#include "bindings/runtime_table.h"
#include "executors/offload.h"
#include "memory/host_shards.h"

namespace {

using namespace ldc;
using namespace ldc::testing;

void test_shard_shapes() {
  EXPECT((row_shard_shape({5, 3}, 2) == std::vector<int64_t>{3, 3}));
  EXPECT((flat_shard_shape({5, 3}, 2) == std::vector<int64_t>{8}));
  EXPECT((row_shard_shape({}, 4) == std::vector<int64_t>{1}));
  EXPECT((flat_shard_shape({0, 3}, 4) == std::vector<int64_t>{0}));
}

void test_registry() {
  Bench bench;
  bench.add(1, {5, 3});
  EXPECT(!bench.registry.at(1).even(2));
  EXPECT(refuses("needs a `shard` of shape", [&] {
    bench.registry.add(2, "x", {5, 3}, ones({2, 3}), {}, {}, false);
  }));
  EXPECT(refuses("already taken", [&] { bench.add(1, {6, 3}); }));
  bench.add(1, {5, 3});  // the same again
  EXPECT(refuses("not registered", [&] { bench.registry.at(9); }));
  EXPECT((bench.registry.ids() == Ids{1}));
  EXPECT(bench.registry.owns(bench.registry.at(1).shard.storage()));
  const Tensor old = bench.registry.at(1).grad;
  bench.registry.replace_grad(1, at::zeros({3, 3}));
  EXPECT(!bench.registry.owns(old.storage()));
  bench.registry.free_unused_grads({1});
  EXPECT(bench.registry.at(1).grad.storage().nbytes() == 0);
  bench.registry.allocate_grad(bench.registry.at(1));
  EXPECT(bench.registry.at(1).grad.storage().nbytes() == 36);
}

/// A buffer of somebody else's, or one without memory, is not taken, and the parameter keeps the one that it has.
void test_refused_gradient_buffers() {
  Bench bench;
  bench.add(1, {4, 2});
  const Tensor shard = bench.registry.at(1).shard, grad = bench.registry.at(1).grad;
  std::vector<float> memory(4);
  const Tensor fixed = at::from_blob(memory.data(), {2, 2});
  const Tensor freed = at::zeros({2, 2});
  freed.storage().set_data_ptr_noswap(freed.storage().allocator()->allocate(0));
  freed.storage().set_nbytes(size_t{0});
  for (const auto& [buffer, text] : {std::pair(fixed, "cannot be resized"), std::pair(freed, "`grad` is empty")}) {
    EXPECT(refuses(text, [&] { bench.registry.replace_grad(1, buffer); }));
    EXPECT(refuses(text, [&] { bench.registry.add(1, "p1", {4, 2}, shard, buffer, {}, false); }));
    EXPECT(bench.registry.contains(1) && bench.registry.at(1).grad.is_alias_of(grad));
    EXPECT(bench.registry.owns(grad.storage()) && !bench.registry.owns(buffer.storage()));
  }
  bench.reductions.reduce({1}, {ones({4, 2})});
  bench.reductions.drain();
  EXPECT(grad.eq(1).all().item<bool>());
  bench.registry.replace_grad(1, at::zeros({2, 2}));
  EXPECT(!bench.registry.owns(grad.storage()));
}

void test_runs() {
  const Tensor base = at::zeros({2048});
  const auto part = [&](int64_t begin, int64_t length) { return base.narrow(0, begin, length); };
  const std::vector<CopyKind> halves(4, {c10::kHalf});
  int64_t end = 100 * kAlignment;
  const auto runs = neighbour_runs({part(10, 5), part(0, 10), part(20, 4), part(1000, 4)}, halves, end);
  EXPECT(runs.size() == 2 && runs[0].members == (std::vector<size_t>{1, 0, 2}) && runs[0].length == 24);
  EXPECT(runs[0].start == 100 * kAlignment && runs[1].start == 101 * kAlignment && end == 102 * kAlignment);
  const Tensor buffer = at::zeros({end}, at::TensorOptions().dtype(c10::kByte));
  const Tensor copy = runs[0].in(buffer, part(20, 4));
  EXPECT(copy.storage_offset() == 50 * kAlignment + 20 && copy.numel() == 4 && copy.scalar_type() == c10::kHalf);
  const auto apart = neighbour_runs({part(0, 4), part(8, 4)}, {halves[0], halves[1]}, end,
                                    [](const c10::Storage&, int64_t, int64_t) { return false; });
  EXPECT(apart.size() == 2);
}

void test_arena() {
  Arena arena(kCpu);
  const Stream stream = current_stream(kCpu);
  auto first = arena.acquire(1000, stream);
  const void* address = first->bytes.const_data_ptr();
  arena.release(std::move(first), stream);
  auto again = arena.acquire(900, stream);
  EXPECT(again->bytes.const_data_ptr() == address);
  auto large = arena.acquire(int64_t{8} << 20, stream);
  arena.release(std::move(large), stream);
  auto small = arena.acquire(100, stream);  // must not take the large one
  EXPECT(small->capacity() < 4096);
  arena.free_unused();
  EXPECT(arena.bytes() == again->capacity() + small->capacity() && arena.peak_bytes() > arena.bytes());
}

void test_bucket() {
  RuntimeOptions options;
  options.reduce_bucket_size = 20;
  Bench bench(options);
  for (int64_t id = 0; id < 3; ++id) bench.add(id, {4, 2});  // 8 elements
  bench.add(3, {10, 3});                                     // larger than the bucket
  for (int64_t id = 0; id < 3; ++id) bench.reductions.collect(id, ones({4, 2}));
  EXPECT((bench.wire->groups == std::vector<int64_t>{2}));  // the third one did not fit
  bench.reductions.collect(3, ones({10, 3}));
  EXPECT((bench.wire->groups == std::vector<int64_t>{2, 1, 1}));  // what waits goes first, the large one alone
  bench.reductions.collect(0, ones({4, 2}));
  bench.reductions.reduce({1, 0, 0}, {ones({4, 2}), ones({4, 2}), ones({4, 2})});
  EXPECT((bench.wire->groups == std::vector<int64_t>{2, 1, 1, 1, 2, 1}));  // in the order of the calls, per parameter
  bench.reductions.drain();
  EXPECT(bench.registry.at(0).grad.eq(4).all().item<bool>() && bench.registry.at(2).grad.eq(1).all().item<bool>());
  bench.reductions.start_accumulation({0});
  // Send buffers of a fused group are bounded, too: two of these do not fit together.
  bench.wire->groups.clear();
  bench.reductions.reduce({0, 1, 2}, std::vector<Tensor>(3, ones({2, 4}).t()));
  EXPECT((bench.wire->groups == std::vector<int64_t>{2, 1}) && bench.stats.copied_grads == 3);
}

void test_padding_is_zero() {
  Bench bench;
  bench.add(0, {3, 2});
  bench.reductions.reduce({0}, {at::full({3, 2}, 7.0)});
  bench.reductions.drain();
  EXPECT(bench.registry.at(0).grad.eq(7).all().item<bool>());
  EXPECT(bench.stats.reduced_bytes == 4 * 2 * 4 && bench.stats.copied_grads == 1);
}

void test_held_gradients() {
  Bench bench;
  bench.add(0, {4, 2});
  bench.add(1, {4, 2});
  const auto executor = bench.executor(1, {0, 1});
  bench.boundary = false;
  for (int i = 0; i < 2; ++i) {
    executor->reduce({0, 1}, {ones({4, 2}, c10::kBFloat16), ones({4, 2}, c10::kBFloat16)});
    executor->end_backward();
  }
  EXPECT(bench.wire->groups.empty() && bench.reductions.ids_with_grad().empty());
  bench.boundary = true;
  executor->reduce(0, ones({4, 2}, c10::kBFloat16));
  EXPECT(bench.reductions.any_held() == "p1");
  executor->end_backward();
  bench.reductions.drain();
  EXPECT(bench.registry.at(0).grad.eq(3).all().item<bool>() && bench.registry.at(1).grad.eq(2).all().item<bool>());
  EXPECT(bench.stats.reduced_bytes == 2 * 8 * 2);  // on the wire in the gradients' own dtype
}

void test_failed_reductions_are_forgotten() {
  Bench bench;
  bench.add(0, {4, 2});
  bench.wire->broken = true;
  bench.reductions.reduce({0}, {ones({4, 2})});
  EXPECT(refuses("the wire is cut", [&] { bench.reductions.drain(); }));
  bench.reductions.drain();
  bench.reductions.reduce({0}, {ones({4, 2})});
  bench.reductions.reset();
  bench.wire->broken = false;
  bench.reductions.start_accumulation({0});
  bench.reductions.reduce({0}, {ones({4, 2})});
  bench.reductions.drain();
  EXPECT(bench.registry.at(0).grad.eq(1).all().item<bool>());
}

void test_use_counts_and_residency() {
  Bench bench;
  bench.add(0, {4, 2});
  bench.add(1, {5, 2});
  const auto sharded = bench.executor(3, {0, 1});
  EXPECT(refuses("does not belong to graph", [&] { sharded->prefetch({7}, {}); }));
  EXPECT(refuses("is not gathered", [&] { sharded->release_use(0, 1); }));
  sharded->prefetch({0, 1}, {c10::kBFloat16, std::nullopt});
  EXPECT((sharded->wait({1})[0].sizes() == at::IntArrayRef{5, 2}));
  EXPECT(refuses("is gathered as", [&] { sharded->allgather(0, c10::kFloat); }));
  sharded->release_use(0, 2);
  EXPECT(bench.gathers.is_gathered(0));
  EXPECT(refuses("`n_users` of parameter id 0 was 2", [&] { sharded->release_use(0, 3); }));
  sharded->release_use(0, 2);
  EXPECT(!bench.gathers.is_gathered(0));
  sharded->release({1});
  EXPECT(bench.gathers.arena().bytes() == 0);

  const auto whole = bench.executor(2, {0, 1});
  for (const int64_t id : {1, 0}) {
    whole->allgather(id, {});
    whole->wait({id});
    whole->release_use(id, 1);
  }
  EXPECT(bench.gathers.is_gathered(0) && bench.gathers.is_gathered(1));
  bench.gathers.invalidate();
  EXPECT(!bench.gathers.is_gathered(0));
  bench.wire->groups.clear();
  bench.gathers.refetch();
  EXPECT((bench.wire->groups == std::vector<int64_t>{1, 1}) && bench.gathers.is_gathered(1));
}

void test_memory_retry() {
  int64_t left = 3, tries = 0;
  const auto short_of_memory = [&]() -> int {
    tries += 1;
    TORCH_CHECK_WITH(OutOfMemoryError, left == 0, "none left");
    return 7;
  };
  EXPECT(allocate_with_retry([&] { return left--; }, short_of_memory) == 7 && tries == 4);
  left = 1;
  EXPECT(refuses("none left", [&] { allocate_with_retry([] { return int64_t{0}; }, short_of_memory); }));
  EXPECT(refuses("none left", [&] { allocate_with_retry({}, short_of_memory); }));

  Bench bench;
  for (int64_t id = 0; id < 3; ++id) bench.add(id, {4, 2});
  bench.gathers.launch({0, 1}, {});
  bench.gathers.launch({2}, {});
  const Tensor before = bench.gathers.wait(0).clone();
  Tensor read = bench.gathers.wait(1);
  EXPECT(bench.gathers.give_back() > 0 && bench.gathers.give_back() == 0);  // the second group goes: nobody reads it
  const int64_t held = bench.gathers.arena().bytes();
  EXPECT(held > 0 && read.equal(bench.gathers.wait(1)) && bench.gathers.owns(read.storage()));
  read.reset();
  EXPECT(bench.gathers.give_back() == held && bench.gathers.arena().bytes() == 0);
  EXPECT(bench.stats.sent_away_bytes > held && bench.stats.away_peak_bytes > 0);
  bench.gathers.launch({0}, {});  // it is there, only elsewhere
  EXPECT(bench.wire->groups.size() == 2 && bench.stats.gather_hits == 1);
  EXPECT(bench.gathers.wait(0).equal(before) && bench.gathers.arena().bytes() <= held);
  bench.gathers.release(2);  // while it is away
  bench.gathers.release(0);
  bench.gathers.release(1);
  EXPECT(bench.gathers.arena().bytes() == 0);
}

void test_dry_runs_send_nothing() {
  Bench bench;
  bench.add(0, {4, 2});
  bench.gathers.set_dry(true);
  bench.reductions.set_dry(true);
  bench.gathers.launch({0}, {});
  EXPECT((bench.gathers.wait(0).sizes() == at::IntArrayRef{4, 2}));
  bench.reductions.reduce({0}, {ones({4, 2})});
  EXPECT(refuses("floating gradient", [&] { bench.reductions.collect(0, ones({2, 4})); }));
  bench.gathers.set_dry(false);
  EXPECT(!bench.gathers.is_gathered(0) && bench.wire->groups.empty() && bench.stats.gathers == 0);
}

void test_host_pool() {
  const auto memory = host_memory(3 * 4096);
  const auto pool = std::make_shared<HostPool>(memory);
  memory->make_room_with([&] { pool->free_unused(); });
  const Stream stream = current_stream(kCpu);
  const Tensor like = at::zeros({4, 8}).t();
  auto first = pool->acquire(like, stream);
  EXPECT(first.tensor.strides() == like.strides());
  const void* address = first.tensor.const_data_ptr();
  Tensor held = flat(first.tensor.t());
  first = {};
  EXPECT(pool->acquire(like, stream).tensor.const_data_ptr() != address);  // a view still holds it
  EXPECT(pool->bytes() == 2 * 4096);
  EXPECT(refuses("at most 12288 bytes", [&] { pool->acquire(at::zeros({4096}), stream); }));
  EXPECT(pool->bytes() == 4096);  // what was free made room
  std::thread([&held] { held.reset(); }).join();  // on whatever thread
  EXPECT(pool->acquire(like, stream).tensor.const_data_ptr() == address);
  pool->free_unused();
  EXPECT(pool->bytes() == 0);
}

void test_offload() {
  Bench bench;
  OffloadEngine offloads(kCpu, bench.registry, bench.gathers, bench.stats, host_memory());
  const Tensor source = at::arange(10);
  const Tensor host = offloads.offload(source, 1);
  source.zero_();
  EXPECT(refuses("offloaded already", [&] { offloads.offload(source, 1); }));
  EXPECT(refuses("returned for it", [&] { offloads.reload(source, 1); }));
  offloads.reload(host, 1);
  EXPECT(offloads.wait_reload(1).sum().item<int64_t>() == 45);
  bench.add(0, {6, 2});
  offloads.offload_param(0);
  EXPECT(bench.registry.at(0).shard.storage().nbytes() == 0);
  EXPECT(refuses("reload_parameter", [&] { bench.gathers.launch({0}, {}); }));
  offloads.reload_param(0);
  EXPECT(bench.registry.at(0).shard.eq(1).all().item<bool>());
}

void test_host_slabs() {
  HostSlabs slabs(host_memory(3 << 20), "things", [] {});
  const Tensor like = at::empty({100, 7}, at::TensorOptions().device(c10::kMeta));
  Tensor first = slabs.place(like), second = slabs.place(like);
  const auto apart = static_cast<const char*>(second.const_data_ptr()) - static_cast<const char*>(first.const_data_ptr());
  EXPECT(apart == align_up(100 * 7 * 4, kAlignment) && slabs.bytes() == 1 << 20);
  EXPECT(refuses("contiguous", [&] { slabs.place(like.t()); }));
  EXPECT(refuses("of at most 3145728 bytes", [&] { slabs.place(at::empty({3 << 20}, like.options())); }));
  Tensor large = slabs.place(at::empty({1 << 18}, like.options()));  // does not fit into the first slab any more
  EXPECT(slabs.bytes() == 2 << 20);
  large.reset();
  slabs.free_unused();
  EXPECT(slabs.bytes() == 1 << 20);
  const Tensor view = first.narrow(0, 3, 2);
  first.reset();
  second.reset();
  slabs.free_unused();
  EXPECT(slabs.bytes() == 1 << 20);  // a view still lies in it
}

/// Tensors that go make room for others of any size, once the copies that use their memory are done.
void test_host_slabs_are_used_again() {
  int64_t waited = 0;
  HostSlabs slabs(host_memory(2 << 20), "things", [&] { ++waited; });
  const auto place = [&](int64_t bytes, double value) { return slabs.place(at::empty({bytes}, c10::kByte)).fill_(value); };
  const Tensor stays = place(5000, 7);
  for (int round = 0; round < 10; ++round) {
    std::vector<Tensor> states;
    for (int i = 0; i < 10; ++i) states.push_back(place(100'000 - 1000 * i, i));
    EXPECT(slabs.bytes() == 1 << 20 && waited == round);  // only those that need the memory of others wait
    for (int i = 0; i < 10; ++i) EXPECT(states[static_cast<size_t>(i)].eq(i).all().item<bool>());
    std::swap(states[0], states[static_cast<size_t>(round)]);  // they go in another order than they came
  }
  Tensor whole = place((1 << 20) - 10 * kAlignment, 1);  // gaps that touch are one
  EXPECT(slabs.bytes() == 1 << 20 && waited == 10 && stays.eq(7).all().item<bool>());
  EXPECT(refuses("no host memory", [&] { place(1 << 21, 1); }));
  EXPECT(waited == 10);  // nothing has gone
  whole.reset();
  slabs.free_unused();
  EXPECT(slabs.bytes() == 1 << 20 && waited == 10);  // the caller has waited
  slabs.reserve({500'000, 500'000});
  EXPECT(slabs.bytes() == 1 << 20);
  const Tensor first = place(500'000, 1), second = place(500'000, 2);  // what is reserved, without a wait
  EXPECT(slabs.bytes() == 1 << 20 && waited == 10 && first.eq(1).all().item<bool>());
}

void test_host_shards() {
  HostSlabs slabs(host_memory(0), "shards", [] {});
  Tensor flat = place_host_shard(slabs, 200, at::kFloat, kCpu).fill_(1);
  const Tensor shard = flat.narrow(0, 128, 6).view({2, 3});
  EXPECT(host_of(shard).const_data_ptr() == shard.const_data_ptr());
  EXPECT(!host_of(ones({2})).defined() && !host_of(shard.t()).defined());
  EXPECT(refuses("must not be negative", [&] { place_host_shard(slabs, -1, at::kFloat, kCpu); }));
  Bench bench;
  bench.registry.add(1, "p1", {4, 3}, shard, {}, {}, false);
  bench.add(2, {4, 3});
  for (int round = 0; round < 3; ++round) {
    bench.gathers.launch({1, 2}, {at::kDouble, at::kFloat});
    EXPECT(bench.gathers.wait(1).eq(1 + round).all().item<bool>());
    bench.gathers.release(1);
    bench.gathers.release(2);
    flat.add_(1);
  }
  EXPECT(bench.gathers.arena().bytes() == 0 && bench.stats.fetched_bytes == 3 * kAlignment);
  bench.registry.clear();
  flat.reset();
  slabs.free_unused();
  EXPECT(slabs.bytes() > 0 && shard.eq(4).all().item<bool>());  // a view still lies in it
}

void test_serials() {
  const int64_t first = reserve_serial(-1);
  EXPECT(reserve_serial(-1) == first + 1);
  EXPECT(refuses("is in use", [&] { reserve_serial(first); }));
  forget_serial(first);
  EXPECT(reserve_serial(-1) == first);
  EXPECT(refuses("not negative", [] { find_runtime(-5); }));
  EXPECT(refuses("dc.init", [] { find_runtime(5); }));
  EXPECT(refuses("never created", [] { find_runtime(int64_t{77} << 32); }));
}

}  // namespace

int main() {
  test_shard_shapes();
  test_registry();
  test_refused_gradient_buffers();
  test_runs();
  test_arena();
  test_bucket();
  test_padding_is_zero();
  test_held_gradients();
  test_failed_reductions_are_forgotten();
  test_use_counts_and_residency();
  test_memory_retry();
  test_shortage();
  test_dry_runs_send_nothing();
  test_host_pool();
  test_offload();
  test_host_slabs();
  test_host_slabs_are_used_again();
  test_host_shards();
  test_host_memory();
  test_state_copies();
  test_stream_order();
  test_windows();
  test_failures();
  test_serials();
  std::printf("%s\n", failures == 0 ? "all parts pass" : "FAILED");
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

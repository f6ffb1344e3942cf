// Every allocation of the runtime's own that a step needs goes on when memory has been given back.
#include <ATen/ops/arange.h>
#include <c10/core/CPUAllocator.h>

#include "executors/state_copies.h"
#include "fake_streams.h"
#include "memory/host_shards.h"

namespace ldc::testing {
namespace {

/// Takes the place of torch's allocator, and refuses one allocation.
class Scarce final : public c10::Allocator {
 public:
  Scarce() : inner_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this); }
  ~Scarce() override { c10::SetCPUAllocator(inner_); }

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes > 0 && left_-- == 0) {
      refused_ = true;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "none left");
    }
    return inner_->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return inner_->raw_deleter(); }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    inner_->copy_data(target, source, bytes);
  }

  /// How many allocations `call` makes. It is made once for each of them, which is refused; each time memory is given
  /// back once.
  template <typename Call>
  int64_t refuse_each(const Call& call) {
    for (int64_t nth = 0;; ++nth) {
      asked_ = 0;
      const bool refused = refuse(nth, call);
      EXPECT(asked_ == (refused ? 1 : 0));
      if (!refused) return nth;
    }
  }
  /// Whether `call` makes more than `nth` allocations, of which that one is refused.
  template <typename Call>
  bool refuse(int64_t nth, const Call& call) {
    refused_ = false;
    left_ = nth;
    call();
    left_ = -1;
    return refused_;
  }
  GiveBack give_back() {
    return [this] { return ++asked_; };
  }

 private:
  c10::Allocator* const inner_;
  int64_t left_ = -1;  // allocations until the one that is refused; negative: none is
  int64_t asked_ = 0;  // for memory
  bool refused_ = false;
};

void test_gathers_and_reductions_outside_programs(Scarce& scarce) {
  Bench bench;
  bench.gathers.retry_with(scarce.give_back());
  bench.reductions.retry_with(scarce.give_back());
  HostSlabs slabs(host_memory(), "shards", [] {});
  const Tensor shard = place_host_shard(slabs, 4, c10::kFloat, kCpu).fill_(3).view({2, 2});
  Tensor full;
  EXPECT(scarce.refuse_each([&] { full = bench.gathers.gather_now(shard, {4, 2}, c10::kHalf, "w"); }) == 3);
  EXPECT(full.eq(3).all().item<bool>() && full.scalar_type() == c10::kHalf);
  const Tensor grad = ones({3, 2});  // is padded, cast for the wire, and cast back
  Tensor mean;
  const auto reduce = [&] { mean = bench.reductions.reduce_now(grad, {2, 2}, c10::kFloat, c10::kHalf, "w"); };
  EXPECT(scarce.refuse_each(reduce) == 4);
  EXPECT(mean.eq(1).all().item<bool>());
}

void test_shards_and_tensors_that_come_back(Scarce& scarce) {
  Bench bench;
  bench.add(0, {6, 2});
  const Device device = FakeDevice::instance().device();  // a copy of a host tensor takes memory there
  OffloadEngine offloads(device, bench.registry, bench.gathers, bench.stats, host_memory());
  offloads.retry_with(scarce.give_back());
  const Tensor shard = bench.registry.at(0).shard;
  const auto travel = [&] {
    offloads.offload_param(0);
    EXPECT(shard.storage().nbytes() == 0);
    offloads.reload_param(0);
  };
  travel();  // its place in host memory stays
  EXPECT(scarce.refuse_each(travel) == 1);
  EXPECT(shard.eq(1).all().item<bool>());
  const Tensor packed = at::arange(10);  // by a user's hooks
  std::vector<Tensor> back;
  EXPECT(scarce.refuse_each([&] { back = offloads.reload_group({packed}); }) == 1);
  EXPECT(back[0].equal(packed) && !back[0].is_same(packed));
}

void test_states_that_come_and_go(Scarce& scarce) {
  Stats stats;
  StateCopies states(kCpu, stats, host_memory());
  states.retry_with(scarce.give_back());
  const Tensor buffer = states.host_buffer(ones({40})).fill_(2);
  const auto come_and_go = [&] {
    EXPECT(states.fetch(0, {buffer})[0].const_data_ptr() != buffer.const_data_ptr());
    states.settle();
  };
  EXPECT(scarce.refuse_each(come_and_go) == 1);
  states.expect({{buffer}}, {{0}});
  const auto come_early = [&] {
    states.advance(1);
    EXPECT(states.take()[0][0].sizes() == buffer.sizes());
    states.forget_fetched();
    states.settle();
  };
  EXPECT(scarce.refuse_each(come_early) == 1);
}

/// Whoever needs the memory may be about to work on a stream of the runtime's own. What is given back for him was
/// compute's, so it is compute that waits.
void test_what_is_given_back_is_waited_for(Scarce& scarce) {
  const auto refused_allocations = [&](const auto& call) {
    for (int64_t nth = 0;; ++nth) {
      Streams streams;
      const GiveBack give_back = [&] { return streams.reductions.give_back(); };
      streams.gathers.retry_with(give_back);
      streams.reductions.retry_with(give_back);
      const Tensor grad = streams.fake.tensor(ones({4, 2}));
      streams.reductions.reduce({3}, {grad});
      const FakeDevice::Work reads = streams.wire->last;
      const Tensor one = streams.fake.tensor(ones({2, 4}).t()), two = streams.fake.tensor(ones({4, 2}));
      EXPECT(!streams.compute_waits_for(reads) && streams.reductions.owns(grad.storage()));
      if (!scarce.refuse(nth, [&] { call(streams, one, two); })) return nth;
      EXPECT(streams.compute_waits_for(reads) && !streams.reductions.owns(grad.storage()));
    }
  };
  const auto gather = [](Streams& streams, const Tensor&, const Tensor&) { streams.gathers.launch({0, 1}, {}); };
  EXPECT(refused_allocations(gather) == 1);
  const auto reduce = [](Streams& streams, const Tensor& one, const Tensor& two) {
    streams.reductions.reduce({0, 1}, {one, two});
  };
  EXPECT(refused_allocations(reduce) == 1);  // of the first, which is not contiguous, a copy
}

/// Those on their way when a later group finds no memory.
void test_reductions_that_are_given_up_are_waited_for(Scarce& scarce) {
  RuntimeOptions options;
  options.reduce_bucket_size = 100;
  Streams streams(options);
  streams.reductions.reduce({3}, {streams.fake.tensor(ones({4, 2}))});
  const FakeDevice::Work reads = streams.wire->last;
  streams.reductions.collect(0, streams.fake.tensor(ones({4, 2})));
  streams.reductions.free_grads({});
  EXPECT(streams.compute_waits_for(reads));
  streams.reductions.reduce({2}, {streams.fake.tensor(ones({4, 2}))});
  const FakeDevice::Work again = streams.wire->last;
  streams.reductions.collect(0, streams.fake.tensor(ones({4, 2})));  // is added, out of a buffer
  EXPECT(!streams.compute_waits_for(again));
  bool raised = false;
  EXPECT(scarce.refuse(0, [&] {
    try {
      streams.reductions.drain();
    } catch (const c10::OutOfMemoryError&) {
      raised = true;
    }
  }));
  EXPECT(raised && streams.compute_waits_for(again));
}

}  // namespace

void test_shortage() {
  Scarce scarce;
  test_gathers_and_reductions_outside_programs(scarce);
  test_shards_and_tensors_that_come_back(scarce);
  test_states_that_come_and_go(scarce);
  test_what_is_given_back_is_waited_for(scarce);
  test_reductions_that_are_given_up_are_waited_for(scarce);
}

}  // namespace ldc::testing

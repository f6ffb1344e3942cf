// Every allocation of the runtime's own that a step needs goes on when memory has been given back.
#include <ATen/ops/arange.h>
#include <c10/core/CPUAllocator.h>

#include "executors/offload.h"
#include "executors/state_copies.h"
#include "fake_device.h"
#include "memory/host_shards.h"
#include "support.h"

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
      refused_ = false;
      asked_ = 0;
      left_ = nth;
      call();
      left_ = -1;
      EXPECT(asked_ == (refused_ ? 1 : 0));
      if (!refused_) return nth;
    }
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
  HostSlabs slabs(host_memory(), "shards");
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

}  // namespace

void test_shortage() {
  Scarce scarce;
  test_gathers_and_reductions_outside_programs(scarce);
  test_shards_and_tensors_that_come_back(scarce);
  test_states_that_come_and_go(scarce);
}

}  // namespace ldc::testing

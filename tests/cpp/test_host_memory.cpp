// Hosts that give less than they promised.
#include "support.h"

#include <ATen/ops/empty.h>

#include "executors/offload.h"
#include "executors/state_copies.h"
#include "fake_device.h"

namespace ldc::testing {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

/// A host that has so many bytes and refuses more, as a driver does.
struct Host {
  std::shared_ptr<HostMemory> memory(int64_t limit = 0) {
    return std::make_shared<HostMemory>(kCpu, limit, [this](int64_t bytes) {
      ++asked;
      TORCH_CHECK(bytes <= left, "CUDA error: out of memory\nCUDA kernel errors might be ...");
      return at::empty({bytes}, c10::kByte);
    });
  }
  int64_t left;
  int64_t asked = 0;
};

void test_a_refusal_says_what_to_do() {
  Host host{.left = 3000};
  const auto memory = host.memory(1 << 20);
  const auto first = memory->take(3000, "tests");
  host.left = 0;
  int64_t made_room = 0;
  memory->make_room_with([&] { ++made_room; });
  const char* text =
      "refused 500 bytes of memory for tests, with 3000 held of at most 1048576 (CUDA error: out of memory). "
      "Give CompileConfig(host_memory_budget=...)";
  EXPECT(refuses(text, [&] { memory->take(500, "tests"); }));
  EXPECT(made_room == 1 && host.asked == 3 && memory->held() == 3000);
  EXPECT(refuses("no host memory for 1048576 more bytes of tests: 3000 of at most 1048576", [&] {
    memory->take(1 << 20, "tests");
  }));
  EXPECT(made_room == 2 && host.asked == 3);  // what the limit forbids is not asked for
}

void test_states_are_reserved_or_not_at_all() {
  Host host{.left = 2 * kMiB};
  const auto memory = host.memory();
  HostSlabs slabs(memory, "tests", [] {});
  slabs.reserve({100, 700'000, 700'000});
  EXPECT(slabs.bytes() == 2 * kMiB && memory->held() == 2 * kMiB);
  slabs.place(at::empty({1'000'000}, c10::kByte));
  slabs.free_unused();  // what is reserved stays, and is empty again
  EXPECT(slabs.bytes() == 2 * kMiB);
  host.left = 0;
  std::vector<Tensor> placed;
  for (const int64_t size : {100, 700'000, 700'000}) placed.push_back(slabs.place(at::empty({size}, c10::kByte)));
  EXPECT(refuses("host refused 1048576 bytes", [&] { slabs.reserve({300'000, 800'000}); }));
  placed.push_back(slabs.place(at::empty({300'000}, c10::kByte)));  // what it could have kept is there for others
  placed.clear();
  slabs.free_unused();
  EXPECT(slabs.bytes() == 0 && memory->held() == 0);
}

void test_tensors_stay_where_the_host_refuses() {
  Bench bench;
  Host host{.left = 4096};
  OffloadEngine offloads(kCpu, bench.registry, bench.gathers, bench.stats, host.memory());
  const std::vector<Tensor> tensors{ones({8}), ones({2000}), ones({9})};
  const auto left = [&] {
    int64_t count = 0;
    const std::vector<Tensor> hosts = offloads.offload_group(tensors);
    for (const Tensor& one : hosts) count += HostPool::buffer_of(one) != nullptr;
    offloads.wait_copies(hosts);
    const std::vector<Tensor> back = offloads.reload_group(hosts);
    for (size_t i = 0; i < back.size(); ++i) EXPECT(back[i].equal(tensors[i]));
    EXPECT(hosts[1].is_same(tensors[1]) && back[1].is_same(tensors[1]));
    return count;
  };
  EXPECT(left() == 1 && bench.stats.stayed_tensors == 2);  // no more is asked for
  const int64_t asked = host.asked;
  EXPECT(left() == 1 && host.asked == asked);
  EXPECT(refuses("host refused 8192 bytes", [&] { offloads.offload(ones({2000}), 1); }));
}

void test_one_limit_for_tensors_and_states() {
  Bench bench;
  const auto memory = host_memory(2 * kMiB);
  OffloadEngine offloads(kCpu, bench.registry, bench.gathers, bench.stats, memory);
  StateCopies states(kCpu, bench.stats, memory);
  const Tensor large = at::empty({kMiB + 1}, c10::kByte);
  std::vector<Tensor> away = offloads.offload_group({large});
  EXPECT(HostPool::buffer_of(away[0]) != nullptr && memory->held() == 2 * kMiB);
  EXPECT(offloads.offload_group({large})[0].is_same(large) && bench.stats.stayed_tensors == 1);
  offloads.wait_copies(away);
  away.clear();
  offloads.free_unused();
  EXPECT(HostPool::buffer_of(offloads.offload_group({large})[0]) != nullptr && memory->held() == 2 * kMiB);
  Tensor buffer = states.host_buffer(at::empty({100}, c10::kByte));  // the pool gives back what nobody holds
  EXPECT(memory->held() == kMiB && offloads.host_bytes() == 0);
  EXPECT(offloads.offload_group({large})[0].is_same(large));
  buffer.reset();
  states.synchronize();
  offloads.free_unused();
  EXPECT(HostPool::buffer_of(offloads.offload_group({large})[0]) != nullptr);
}

/// A tensor may go, and with it what is copied there, when the device does not answer any more.
void test_a_lost_device_ends_no_process() {
  FakeDevice& fake = FakeDevice::instance();
  const auto pool = std::make_shared<HostPool>(host_memory());
  const Tensor source = ones({8});
  HostPool::Lease lease = pool->acquire(source, current_stream(kCpu));
  lease.buffer->used.record(current_stream(fake.device()));
  lease.buffer->source = source;
  fake.lost = true;
  lease = {};
  fake.lost = false;
  EXPECT(source.use_count() == 2);  // the device may still read it
  pool->free_unused();
  EXPECT(pool->bytes() == 4096);
  pool->acquire(source, current_stream(kCpu));
  EXPECT(pool->bytes() == 2 * 4096);  // nor is the buffer anybody else's
}

}  // namespace

void test_host_memory() {
  test_a_refusal_says_what_to_do();
  test_states_are_reserved_or_not_at_all();
  test_tensors_stay_where_the_host_refuses();
  test_one_limit_for_tensors_and_states();
  test_a_lost_device_ends_no_process();
}

}  // namespace ldc::testing

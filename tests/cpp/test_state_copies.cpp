// Optimizer states that come to the device chunk by chunk: while the optimizer steps, and ahead of it.
#include "executors/state_copies.h"

#include "fake_device.h"
#include "support.h"

namespace ldc::testing {
namespace {

/// What comes into a slot is behind what leaves it, or is read there, even if nothing was stowed since.
void test_order_of_a_slot() {
  FakeDevice& fake = FakeDevice::instance();
  Stats stats;
  StateCopies states(fake.device(), stats, host_memory());
  const c10::StreamId out = fake.made - 1, in = fake.made;
  const Tensor buffer = states.host_buffer(ones({8}));
  states.begin(kAlignment);
  const auto come_and_go = [&](const std::vector<Tensor>& buffers, bool leaves) {
    std::vector<Tensor> present = states.fetch(0, buffers);
    states.wait(0);
    states.stow(0, leaves ? present : std::vector<Tensor>(), leaves ? buffers : std::vector<Tensor>());
  };
  come_and_go({buffer}, /*leaves=*/true);
  const int64_t left = fake.now(out);
  come_and_go({}, /*leaves=*/true);
  states.fetch(0, {buffer});
  EXPECT(fake.is_behind(in, out, left));
  states.wait(0);
  const int64_t computed = fake.now(fake.current);
  states.stow(0, {}, {});  // what was fetched has been read, and stays elsewhere
  states.fetch(0, {buffer});
  EXPECT(fake.is_behind(in, fake.current, computed + 1));
  states.settle();
}

/// A state that is dropped may still be on its way: its memory is another's when it has arrived.
void test_dropped_states_make_room() {
  FakeDevice& fake = FakeDevice::instance();
  Stats stats;
  StateCopies states(fake.device(), stats, host_memory(1 << 20));
  Tensor buffer = states.host_buffer(at::empty({600'000}, c10::kByte));
  const void* address = buffer.const_data_ptr();
  states.stow(0, {fake.tensor(at::zeros({600'000}, c10::kByte))}, {buffer});
  const auto again = [&] { return states.host_buffer(at::empty({700'000}, c10::kByte)); };
  EXPECT(refuses("no host memory", again));
  buffer.reset();
  fake.lost = true;
  EXPECT(refuses("the device is lost", again));
  fake.lost = false;
  buffer = again();
  EXPECT(buffer.const_data_ptr() == address && states.host_bytes() == 1 << 20);
  states.settle();
}

void test_values() {
  Stats stats;
  StateCopies states(kCpu, stats, host_memory());
  std::vector<Tensor> buffers;
  for (int i = 0; i < 5; ++i) {
    buffers.push_back(states.host_buffer(ones({40 + i})));
    states.stow(i % 3, {ones({40 + i}).mul_(i)}, {buffers.back()});
  }
  for (int step = 0; step < 3; ++step) {
    states.begin(kAlignment);
    std::vector<Tensor> next = states.fetch(0, {buffers[0]});
    for (int i = 0; i < 5; ++i) {
      const std::vector<Tensor> present = next;
      if (i < 4) next = states.fetch((i + 1) % 3, {buffers[static_cast<size_t>(i) + 1]});
      states.wait(i % 3);
      EXPECT(present[0].eq(i + step).all().item<bool>());
      present[0].add_(1);
      states.stow(i % 3, present, {buffers[static_cast<size_t>(i)]});
    }
    EXPECT(states.device_bytes() == 3 * kAlignment);
    step % 2 == 0 ? states.settle() : states.release();
    EXPECT(states.device_bytes() == 0);
  }
  EXPECT(stats.state_peak_bytes == 3 * kAlignment && stats.reloaded_bytes == 3 * 4 * (40 + 41 + 42 + 43 + 44));
  // The first two of five come ahead, are stepped, and are the first to depart; a chunk that nobody takes is dropped.
  const auto chunk = [&](int i) { return std::vector<Tensor>{buffers[static_cast<size_t>(i)]}; };
  states.expect({chunk(0), chunk(1), chunk(2)}, {{0}, {1}, {-1, 2}});
  EXPECT(refuses("1 chunks but slots of 0", [&] { states.expect({chunk(0)}, {}); }));
  for (int step = 3; step < 5; ++step) {
    states.advance(1);
    states.advance(1);
    EXPECT(states.device_bytes() == 2 * kAlignment);
    states.begin(kAlignment);
    states.release();
    EXPECT(states.device_bytes() == 2 * kAlignment);  // it is for what has been stepped
    std::vector<std::vector<Tensor>> present = states.take();
    EXPECT(present.size() == 2 && states.take().empty());
    for (int i = 2; i < 5; ++i) present.push_back(states.fetch(i - 2, chunk(i)));
    for (int i = 0; i < 5; ++i) {
      const int slot = i < 2 ? -1 - i : i - 2;
      states.wait(slot);
      EXPECT(present[static_cast<size_t>(i)][0].eq(i + step).all().item<bool>());
      present[static_cast<size_t>(i)][0].add_(1);
      states.stow(slot, present[static_cast<size_t>(i)], chunk(i));
    }
    for (int64_t left = 4; left >= 2; --left) {
      states.settle_first(1);
      EXPECT(states.device_bytes() == left * kAlignment);
    }
    states.settle_first(7);
    EXPECT(states.device_bytes() == 0);
  }
  states.advance(9);
  EXPECT(states.device_bytes() == 3 * kAlignment);
  states.forget_fetched();
  EXPECT(states.device_bytes() == 0 && states.take().empty());
  states.begin(kAlignment);
  states.fetch(0, {buffers[0]});
  EXPECT(states.fetch(0, {buffers[0], buffers[1]})[1].eq(6).all().item<bool>());  // a slot grows
  EXPECT(states.device_bytes() == 2 * kAlignment);
  states.settle();
  EXPECT(refuses("slot 3", [&] { states.wait(3); }));
  EXPECT(refuses("no slot -1", [&] { states.fetch(-1, {buffers[0]}); }));
  EXPECT(refuses("1 tensors but 0 host buffers", [&] { states.stow(0, {ones({2})}, {}); }));
  buffers.clear();
  states.expect({}, {});
  states.synchronize();
  EXPECT(states.host_bytes() == 0);
}

}  // namespace

void test_state_copies() {
  test_values();
  test_order_of_a_slot();
  test_dropped_states_make_room();
}

}  // namespace ldc::testing

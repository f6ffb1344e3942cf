// Engines of the fake device, and a wire that tells where collectives were queued.
#pragma once

#include <stdexcept>

#include "executors/offload.h"
#include "fake_device.h"
#include "support.h"

namespace ldc::testing {

using Work = FakeDevice::Work;
constexpr c10::StreamId kCompute = 0;

/// Remembers where collectives were queued. Nothing travels, and what is handed over may fail behind that.
class Wire final : public Communicator {
 public:
  Wire() : Communicator(0, 2) {}
  Completion all_gather(const std::vector<Transfer>&) override { return note(); }
  Completion reduce_scatter_mean(const std::vector<Transfer>&) override { return note(); }
  Completion all_reduce_mean(const std::vector<Transfer>&) override { return note(); }

  bool has_windows() const override { return true; }
  Tensor make_window(int64_t bytes) override { return FakeDevice::instance().tensor(at::zeros({bytes}, c10::kByte)); }

  Work last;
  bool broken = false;

 private:
  Completion note() {
    FakeDevice& fake = FakeDevice::instance();
    last = fake.queue(fake.current);
    if (broken) throw std::runtime_error("the wire is cut");
    return {};
  }
};

/// Engines of the fake device. Parameters lie in the host's memory, which is the device's.
struct Streams {
  explicit Streams(RuntimeOptions options = {}) : options(std::move(options)) {
    for (int64_t id = 0; id < 4; ++id) {
      registry.add(id, c10::str("p", id), {4, 2}, ones({2, 2}), at::zeros({2, 2}), {}, false);
    }
  }
  Work compute() { return fake.queue(kCompute); }
  bool compute_waits_for(const Work& work) { return fake.is_behind(kCompute, work); }

  FakeDevice& fake = FakeDevice::instance();
  RuntimeOptions options;
  Stats stats;
  Registry registry{kCpu, 2};
  std::shared_ptr<Wire> wire = std::make_shared<Wire>();
  GatherEngine gathers{fake.device(), wire, registry, stats, options};
  const c10::StreamId gathering = fake.made - 1, fetching = fake.made;
  ReduceEngine reductions{fake.device(), wire, registry, stats, options};
  const c10::StreamId reducing = fake.made;
  OffloadEngine offloads{fake.device(), registry, gathers, stats, host_memory()};
  const c10::StreamId out = fake.made - 1, in = fake.made;
};

}  // namespace ldc::testing

// What goes wrong between ranks: they differ, one is gone, and communication is given up.
#include <thread>

#include "communicators/in_flight.h"
#include "communicators/same_on_all_ranks.h"
#include "communicators/watchdog.h"
#include "support.h"

namespace ldc::testing {
namespace {

void test_ranks_that_differ() {
  Mirror same(2), different(2, 1);
  require_same_on_all_ranks(same, kCpu, "it", {"a", "b"});
  EXPECT(refuses("it differs between ranks: rank 0 has a; rank 1 has", [&] {
    require_same_on_all_ranks(different, kCpu, "it", {"a"});
  }));
}

void test_watchdog() {
  const auto wire = std::make_shared<Mirror>(2);
  std::atomic<int> calls = 0;
  std::string reason;
  Watchdog watchdog({wire}, std::chrono::milliseconds(100), [&](const std::string& text) {
    reason = text;
    ++calls;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT(calls == 0);
  wire->stuck_for = std::chrono::milliseconds(200);
  for (int i = 0; i < 500 && calls == 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  watchdog.stop();
  watchdog.stop();
  EXPECT(calls == 1 && reason == "gather of 'w' is stuck");
}

/// What becomes part of a graph does not run now, and nobody may ask for its events.
void test_captured_operations_are_not_watched() {
  bool captured = true;
  InFlight in_flight(kCpu, [&](const Stream&) { return captured; });
  const auto hand_over = [&] {
    InFlight::Watched watched(in_flight, "gather", {});
    EXPECT(in_flight.first() == "gather");
    watched.queued();
  };
  hand_over();
  EXPECT(in_flight.first().empty());
  captured = false;
  hand_over();
  EXPECT(in_flight.first() == "gather" && in_flight.idle());
}

/// Ends, as NCCL's, when the device does: it waits inside all of `asked`, until each is aborted.
class Entangled final : public Communicator {
 public:
  explicit Entangled(std::atomic<int>& asked) : Communicator(0, 2), asked_(asked) {}
  Completion all_gather(const std::vector<Transfer>&) override { return {}; }
  Completion reduce_scatter_mean(const std::vector<Transfer>&) override { return {}; }
  Completion all_reduce_mean(const std::vector<Transfer>&) override { return {}; }
  void abort() noexcept override {
    ++asked_;
    for (int i = 0; i < 500 && asked_ < 2; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    ended = asked_ == 2;
  }

  bool ended = false;

 private:
  std::atomic<int>& asked_;
};

void test_abort_together() {
  std::atomic<int> asked = 0;
  Entangled gathers(asked), reductions(asked);
  abort_together({&gathers, &reductions});
  EXPECT(gathers.ended && reductions.ended);
}

}  // namespace

void test_failures() {
  test_ranks_that_differ();
  test_watchdog();
  test_captured_operations_are_not_watched();
  test_abort_together();
}

}  // namespace ldc::testing

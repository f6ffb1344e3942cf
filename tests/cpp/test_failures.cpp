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
  EXPECT(in_flight.first() == "gather" && in_flight.history().back().finished == 0);
  EXPECT(in_flight.idle() && in_flight.history().size() == 1 && in_flight.history().back().finished > 0);
}

/// The oldest operations give way, and the end of one that has given way is nobody's.
void test_a_history_keeps_the_last_operations() {
  History history;
  const Tensor part = ones({2}), whole = ones({4});
  const auto kept = static_cast<int64_t>(History::kKept);
  for (int64_t i = 1; i <= kept + 5; ++i) EXPECT(history.begin("gather", {{whole, part, "w"}, {whole, part, "b"}}).number == i);
  history.finish(5);
  history.finish(7);
  const std::vector<Operation> operations = history.operations();
  EXPECT(operations.size() == History::kKept && operations[0].number == 6 && operations[0].finished == 0);
  EXPECT(operations[1].finished >= operations[1].created && operations[1].created > 0);
  EXPECT(operations[0].first == "w" && operations[0].others == 1);
  EXPECT(operations[0].sent == static_cast<int64_t>(2 * part.nbytes()) &&
         operations[0].received == static_cast<int64_t>(2 * whole.nbytes()));
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
  test_a_history_keeps_the_last_operations();
  test_abort_together();
}

}  // namespace ldc::testing

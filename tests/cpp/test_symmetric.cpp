// Gathers through symmetric memory, with threads as ranks: their order, the agreement where a rank fails, and the end.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <barrier>
#include <cstring>
#include <functional>
#include <thread>

#include "communicators/signal_pad.h"
#include "communicators/symmetric_communicator.h"
#include "support.h"

namespace ldc::testing {
namespace {

constexpr int64_t kWorld = 3, kThreshold = 4096;
constexpr std::chrono::milliseconds kNoTime(0);

/// What the ranks of a world share.
struct Hall {
  std::barrier<> gate{kWorld};
  std::array<std::vector<Transfer>, kWorld> groups;
  std::array<std::vector<std::byte>, kWorld> memories;
  std::atomic<int64_t> fail_offer = -1, fail_connect = -1;  // the rank
};

class HallWire final : public Communicator {
 public:
  HallWire(Hall& hall, int64_t rank, std::shared_ptr<InFlight> in_flight)
      : Communicator(rank, kWorld), hall_(hall), in_flight_(std::move(in_flight)) {}

  Completion all_gather(const std::vector<Transfer>& group) override {
    hall_.groups[rank()] = group;
    hall_.gate.arrive_and_wait();
    for (size_t i = 0; i < group.size(); ++i) {
      for (int64_t from = 0; from < kWorld; ++from) {
        const Tensor& in = hall_.groups[from][i].in;
        flat(group[i].out).narrow(0, from * in.numel(), in.numel()).copy_(flat(in));
      }
    }
    hall_.gate.arrive_and_wait();
    ++gathers;
    return {};
  }
  Completion reduce_scatter_mean(const std::vector<Transfer>&) override { return {}; }
  Completion all_reduce_mean(const std::vector<Transfer>&) override { return {}; }
  std::string diagnose(std::chrono::milliseconds limit) override { return in_flight_->overdue(limit); }

  int64_t gathers = 0;

 private:
  Hall& hall_;
  std::shared_ptr<InFlight> in_flight_;
};

/// Plain memory, and a pad that threads poll: what the CUDA implementation does with devices.
class HallMemory final : public PeerMemory {
 public:
  HallMemory(Hall& hall, int64_t rank) : hall_(hall), rank_(rank), pad_(rank, kWorld) {}

  std::string offer(int64_t bytes) override {
    if (hall_.fail_offer == rank_) throw std::runtime_error("out of memory");
    hall_.memories[rank_].assign(static_cast<size_t>(bytes), std::byte{0xee});
    if (rank_ == 0) pad_.create();
    return pad_.name();
  }
  void connect(const std::vector<std::string>& offers) override {
    if (hall_.fail_connect == rank_) throw std::runtime_error("no way to rank 0");
    if (rank_ != 0) pad_.open(offers[0]);
  }
  void connected() override { pad_.unlink(); }
  std::byte* of(int64_t rank) const override { return hall_.memories[rank].data(); }
  void copy(const std::vector<Copy>& copies, bool /*local*/) override {
    for (const Copy& one : copies) std::memcpy(one.to, one.from, static_cast<size_t>(one.bytes));
  }
  void barrier() override {
    ++number_;
    for (int64_t to = 0; to < kWorld; ++to) pad_.store(pad_.index(number_, to, rank_), number_);
    for (int64_t from = 0; from < kWorld; ++from) {
      while (static_cast<int32_t>(pad_.load(pad_.index(number_, rank_, from)) - number_) < 0) std::this_thread::yield();
    }
  }
  std::vector<int64_t> behind() const override { return pad_.behind(); }
  void release() noexcept override { pad_.release(number_); }
  void leave() override {
    if (pad_.mapped()) pad_.leave();
  }
  bool all_left() const override { return pad_.all_left(); }
  void free() override {
    pad_.unmap();
    number_ = 0;
    hall_.memories[rank_].clear();
  }

 private:
  Hall& hall_;
  int64_t rank_;
  SignalPad pad_;
  std::atomic<uint32_t> number_ = 0;
};

struct Rank {
  Rank(Hall& hall, int64_t rank)
      : rank(rank),
        in_flight(std::make_shared<InFlight>(kCpu)),
        wire(std::make_shared<HallWire>(hall, rank, in_flight)),
        symmetric(wire, std::make_shared<HallMemory>(hall, rank), in_flight, kCpu, kThreshold, stats) {}

  /// Gathers shards of `numel` floats and of as many shorts, and an empty one; true if everything came.
  bool gather(int64_t numel, int64_t step) {
    const auto value = [step](int64_t of) { return static_cast<double>(step * kWorld + of); };
    std::vector<Transfer> group;
    for (const auto& [size, dtype] : {std::pair(numel, c10::kFloat), {int64_t{0}, c10::kFloat}, {numel + 7, c10::kShort}}) {
      const auto options = at::TensorOptions().dtype(dtype);
      group.push_back({at::empty({size * kWorld}, options), at::full({size}, value(rank), options), "w"});
    }
    symmetric.all_gather(group).wait();
    bool right = true;
    for (const Transfer& transfer : group) {
      const int64_t size = transfer.in.numel();
      for (int64_t of = 0; of < kWorld; ++of) {
        right = right && transfer.out.narrow(0, of * size, size).eq(value(of)).all().item<bool>();
      }
    }
    return right;
  }

  int64_t rank;
  Stats stats;
  std::shared_ptr<InFlight> in_flight;
  std::shared_ptr<HallWire> wire;
  SymmetricCommunicator symmetric;
};

void on_all_ranks(Hall& hall, const std::function<void(Rank&)>& action) {
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < kWorld; ++rank) {
    threads.emplace_back([&, rank] {
      Rank self(hall, rank);
      action(self);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void test_gathers() {
  Hall hall;
  std::atomic<int64_t> right = 0, counted = 0, grown = 0;
  on_all_ranks(hall, [&](Rank& self) {
    int64_t good = 0;
    for (int64_t step = 0; step < 400; ++step) {
      // Every third is too small to go this way; two are larger than all before.
      const int64_t numel = step == 20 ? 300'000 : step == 40 ? 600'000 : step % 3 == 0 ? 5 : 3000 + 13 * step;
      good += self.gather(numel, step) ? 1 : 0;
      if (step == 39) grown += self.symmetric.workspace_bytes() == int64_t{4} << 20;
    }
    right += good;
    counted += self.stats.symmetric_gathers;
    grown += self.symmetric.workspace_bytes() == int64_t{2} * (4 << 20);
    self.symmetric.close();
  });
  EXPECT(right == kWorld * 400);
  EXPECT(counted == kWorld * (400 - 134 + 0));  // of every third, steps 20 and 40 are none
  EXPECT(grown == 2 * kWorld);
  for (const auto& memory : hall.memories) EXPECT(memory.empty());
}

void test_one_rank_fails(bool at_connect, bool at_first) {
  Hall hall;
  std::atomic<int64_t> right = 0, counted = 0;
  if (at_first) (at_connect ? hall.fail_connect : hall.fail_offer) = 1;
  on_all_ranks(hall, [&](Rank& self) {
    right += self.gather(2000, 0);
    hall.gate.arrive_and_wait();
    (at_connect ? hall.fail_connect : hall.fail_offer) = 1;
    hall.gate.arrive_and_wait();
    right += self.gather(1'000'000, 1);
    hall.fail_connect = hall.fail_offer = -1;
    const int64_t before = self.wire->gathers;
    right += self.gather(2000, 2);
    counted += self.wire->gathers - before;  // no second attempt: one plain gather
    counted += 100 * self.stats.symmetric_gathers;
    EXPECT(self.symmetric.workspace_bytes() == 0);
    self.symmetric.close();
  });
  EXPECT(right == 3 * kWorld && counted == kWorld * (at_first ? 1 : 101));
  for (const auto& memory : hall.memories) EXPECT(memory.empty());
}

void test_a_rank_that_does_not_come() {
  Hall hall;
  on_all_ranks(hall, [&](Rank& self) {
    self.gather(3000, 0);
    if (self.rank != 1) {
      std::thread watchdog([&] {
        const std::string expected = "gather of 'w' and 2 more (number 2) Behind: rank 1.";
        std::string failure;
        for (int i = 0; i < 500 && failure != expected; ++i) {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          failure = self.symmetric.diagnose(kNoTime);
        }
        EXPECT(failure == expected);
        self.symmetric.abort();
      });
      self.gather(3000, 1);
      watchdog.join();
      EXPECT(refuses("was aborted", [&] { self.gather(3000, 2); }));
    }
    self.symmetric.close();
  });
}

void test_retiring_waits_for_nobody() {
  Hall hall;
  std::atomic<bool> first_left = false;
  on_all_ranks(hall, [&](Rank& self) {
    self.gather(3000, 0);
    while (self.rank != 0 && !first_left) std::this_thread::yield();
    std::vector<std::future<void>> pending;
    self.symmetric.retire(pending);
    if (self.rank == 0) {
      EXPECT(pending.size() >= 1 && pending[0].wait_for(kNoTime) == std::future_status::timeout);
      first_left = true;
    }
    for (const auto& end : pending) end.wait();
  });
  for (const auto& memory : hall.memories) EXPECT(memory.empty());
}

void test_late_signals_take_no_release_back() {
  SignalPad mine(0, 2), late(1, 2);
  mine.create();
  late.open(mine.name());
  mine.unlink();
  EXPECT(refuses("shm_open", [&] { SignalPad(1, 2).open(mine.name()); }));
  const auto reached = [&](uint32_t n) { return static_cast<int32_t>(mine.load(mine.index(n, 0, 1)) - n) >= 0; };
  late.store(late.index(1, 0, 1), 1);
  for (uint32_t n = 1; n < 4; ++n) mine.store(mine.index(n, 0, 0), n);
  EXPECT(reached(1) && !reached(2) && mine.behind() == std::vector<int64_t>{1});
  mine.release(3);
  late.store(late.index(2, 0, 1), 2);
  EXPECT(reached(2) && reached(3));
  EXPECT(late.load(late.index(2, 1, 0)) == 0);  // the other rank's row is its own
  late.leave();
  EXPECT(!mine.all_left());
  mine.leave();
  EXPECT(late.all_left());
  mine.unmap();
  late.unmap();
}

}  // namespace

void test_symmetric() {
  test_late_signals_take_no_release_back();
  test_gathers();
  for (const bool at_connect : {false, true}) {
    for (const bool at_first : {false, true}) test_one_rank_fails(at_connect, at_first);
  }
  test_a_rank_that_does_not_come();
  test_retiring_waits_for_nobody();
}

}  // namespace ldc::testing

// Memory into which other ranks gather: that ranks which do the same take the same, whatever else they do.
#include "memory/windows.h"

#include <ATen/ops/empty.h>

#include "support.h"

namespace ldc::testing {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

struct Rank {
  std::shared_ptr<Windows> windows = std::make_shared<Windows>(
      kCpu, kMiB,
      [this](int64_t bytes) {
        made.push_back(bytes);
        return refuses ? Tensor() : at::empty({bytes}, c10::kByte);
      },
      [this](const Tensor& window) { made.push_back(-window.numel()); });
  std::unique_ptr<Windows::Use> take(int64_t bytes) { return windows->take(bytes, current_stream(kCpu)); }
  std::vector<int64_t> made;
  bool refuses = false;
};

void test_which_window_is_taken() {
  Rank rank, other;
  EXPECT(!rank.take(kMiB - 1) && rank.made.empty());
  std::vector<std::unique_ptr<Windows::Use>> here, there;
  for (const int64_t size : {5, 9, 5}) {
    here.push_back(rank.take(size * kMiB));
    there.push_back(other.take(size * kMiB));
  }
  EXPECT((rank.made == std::vector<int64_t>{6 * kMiB, 10 * kMiB, 6 * kMiB}) && rank.windows->bytes() == 22 * kMiB);
  // Released in another order, and one of them by an error.
  here[0]->release(current_stream(kCpu));
  here.clear();
  there[2].reset();
  there[0].reset();
  there[1].reset();
  for (Rank* one : {&rank, &other}) {
    const auto small = one->take(5 * kMiB), large = one->take(9 * kMiB), again = one->take(5 * kMiB);
    const auto wasteful = one->take(2 * kMiB);  // not worth a window of three times the size
    EXPECT(small->bytes().numel() == 6 * kMiB && large->bytes().numel() == 10 * kMiB && wasteful);
    EXPECT(one->made.size() == 4 && one->made.back() == 2 * kMiB);
  }
  EXPECT(rank.windows->digest() == other.windows->digest() && rank.windows->digest() != 0);
  rank.take(9 * kMiB);
  other.take(5 * kMiB);
  EXPECT(rank.windows->digest() != other.windows->digest());
}

void test_without_memory() {
  Rank rank;
  rank.refuses = true;
  EXPECT(!rank.take(2 * kMiB) && !rank.take(2 * kMiB));
  EXPECT(rank.made.size() == 1 && rank.windows->bytes() == 0);  // nobody asks all ranks again
  rank.refuses = false;
  rank.windows->free_unused();
  EXPECT(rank.take(2 * kMiB) != nullptr);
}

void test_windows_are_given_up() {
  Rank rank;
  const auto kept = rank.take(4 * kMiB);
  rank.take(2 * kMiB);
  rank.windows->free_unused();
  EXPECT((rank.made == std::vector<int64_t>{4 * kMiB, 2 * kMiB, -2 * kMiB}) && rank.windows->bytes() == 4 * kMiB);
  EXPECT(kept->bytes().numel() == 4 * kMiB && rank.take(2 * kMiB)->bytes().numel() == 2 * kMiB);
  EXPECT(rank.made.size() == 4 && rank.windows->bytes() == 6 * kMiB);
}

/// Parameters come out of windows as they come out of the arena, which other groups still use.
void test_gathers() {
  RuntimeOptions options;
  options.symmetric_threshold = 4096;
  Bench bench(options);
  bench.add(1, {4096, 2});
  bench.add(2, {3, 2});
  for (int round = 0; round < 3; ++round) {
    bench.gathers.launch({1}, {c10::kDouble});
    bench.gathers.launch({2}, {});
    const Tensor whole = bench.gathers.wait(1);
    EXPECT(whole.scalar_type() == c10::kDouble && whole.eq(1 + round).all().item<bool>());
    EXPECT(bench.gathers.wait(2).eq(1 + round).all().item<bool>());
    for (const int64_t id : {1, 2}) {
      bench.registry.at(id).shard.add_(1);
      bench.gathers.release(id);
    }
  }
  EXPECT((bench.wire->windows == std::vector<int64_t>{2 * kMiB}) && bench.stats.symmetric_gathers == 3);
  EXPECT(bench.stats.gather_groups == 6 && bench.gathers.arena().bytes() == 0);
  // A rank that is short of memory takes nothing away from the others.
  bench.gathers.launch({1}, {});
  bench.gathers.wait(1);
  EXPECT(bench.gathers.give_back() == 0 && bench.gathers.wait(1).eq(4).all().item<bool>());
}

}  // namespace

void test_windows() {
  test_which_window_is_taken();
  test_without_memory();
  test_windows_are_given_up();
  test_gathers();
}

}  // namespace ldc::testing

// What the tests of the parts share: expectations, and a wire between two ranks that are one process.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <atomic>
#include <cstdio>

#include "executors/executor.h"
#include "memory/host_memory.h"
#include "memory/views.h"

namespace ldc::testing {

inline int failures = 0;

#define EXPECT(condition)                                                        \
  do {                                                                           \
    if (!(condition)) {                                                          \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, #condition);                \
      ++failures;                                                                \
    }                                                                            \
  } while (false)

/// Whether `call` raises, with `text` in the message.
template <typename Call>
bool refuses(const char* text, Call call) {
  try {
    call();
  } catch (const std::exception& error) {
    if (message_of(error).find(text) != std::string::npos) return true;
    std::printf("unexpected message: %s\n", message_of(error).c_str());
  }
  return false;
}

const Device kCpu(c10::DeviceType::CPU);

inline std::shared_ptr<HostMemory> host_memory(int64_t limit = 0) { return std::make_shared<HostMemory>(kCpu, limit); }

inline Tensor ones(at::IntArrayRef sizes, ScalarType dtype = c10::kFloat) { return at::ones(sizes, dtype); }

/// Rank 0 of `world` ranks which all have the same tensors, except that others' bytes are rank 0's plus `skew`.
class Mirror final : public Communicator {
 public:
  explicit Mirror(int64_t world, int64_t skew = 0) : Communicator(0, world), skew_(skew) {}

  Completion all_gather(const std::vector<Transfer>& group) override {
    groups.push_back(static_cast<int64_t>(group.size()));
    return Completion([this, group] {
      for (const Transfer& transfer : group) {
        for (int64_t rank = 0; rank < world_size(); ++rank) {
          const Tensor part = flat(transfer.out).narrow(0, rank * transfer.in.numel(), transfer.in.numel());
          part.copy_(flat(transfer.in));
          if (rank > 0 && skew_ != 0) part.add_(skew_);
        }
      }
    });
  }

  Completion reduce_scatter_mean(const std::vector<Transfer>& group) override {
    groups.push_back(static_cast<int64_t>(group.size()));
    return Completion([this, group] {
      if (broken) throw std::runtime_error("the wire is cut");
      for (const Transfer& transfer : group) {
        flat(transfer.out).copy_(flat(transfer.in).narrow(0, 0, transfer.out.numel()));
      }
    });
  }

  Completion all_reduce_mean(const std::vector<Transfer>& group) override {
    for (const Transfer& transfer : group) flat(transfer.out).copy_(flat(transfer.in));
    return {};
  }

  bool has_windows() const override { return true; }
  Tensor make_window(int64_t bytes) override {
    windows.push_back(bytes);
    return no_windows ? Tensor() : at::empty({bytes}, c10::kByte);
  }

  void drop_window(const Tensor& window) override { windows.push_back(-window.numel()); }

  std::string diagnose(std::chrono::milliseconds limit) override {
    return stuck_for.load() > limit ? std::string("gather of 'w' is stuck") : std::string();
  }

  std::vector<int64_t> groups;   // sizes, in order
  std::vector<int64_t> windows;  // bytes that were asked for
  bool no_windows = false;
  bool broken = false;
  std::atomic<std::chrono::milliseconds> stuck_for{};

 private:
  int64_t skew_;
};

void test_failures();      // test_failures.cpp
void test_state_copies();  // test_state_copies.cpp
void test_stream_order();  // test_stream_order.cpp
void test_host_memory();   // test_host_memory.cpp
void test_shortage();      // test_shortage.cpp
void test_windows();       // test_windows.cpp

/// Everything below a runtime, for a world of two.
struct Bench {
  explicit Bench(RuntimeOptions options = {}) : options(std::move(options)) {}
  void add(int64_t id, std::vector<int64_t> shape) {
    const auto shard = row_shard_shape(shape, 2);
    registry.add(id, c10::str("p", id), std::move(shape), ones(shard), at::zeros(shard), {}, false);
  }
  RuntimeOptions options;
  std::shared_ptr<Mirror> wire = std::make_shared<Mirror>(2);
  Stats stats;
  Registry registry{kCpu, 2};
  GatherEngine gathers{kCpu, wire, registry, stats, options};
  ReduceEngine reductions{kCpu, wire, registry, stats, options};
  bool boundary = true;
  std::unique_ptr<Executor> executor(int64_t stage, const Ids& ids, const std::string& reduce = "") {
    return make_executor(stage, reduce, 0, ids, boundary, registry, gathers, reductions);
  }
};

}  // namespace ldc::testing

// The wire: how a group of tensors is gathered or reduced over the ranks. Two implementations: NCCL with communicators
// of our own, and any torch ProcessGroup (gloo on CPU). The engines above use the same calls for both, for a pair of
// them where ranks share parameters in groups (hybrid_communicator.h), and for one rank alone (solo_communicator.h).
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/common.h"

namespace ldc {

/// One tensor of a group. Both sides are contiguous and of one dtype, and they differ `world_size` times in size (but see
/// `all_reduce_mean`): a gather writes rank r's `in` to the r-th part of `out`; a reduction writes the mean of this rank's
/// part of everybody's `in` to `out`. Of a gather, `in` may be this rank's part of `out`.
struct Transfer {
  Tensor out;
  Tensor in;
  std::string_view name;  // of the parameter, for error messages; lives at least as long as the call
};

/// When the results of a group may be used. A communicator that works in stream order returns an empty one. Otherwise
/// `wait` blocks the current stream (CPU: the calling thread) and finishes what the wire could not do (the mean).
/// Holds whatever tensors the wire still reads or writes. `wait` raises the failure of the operation.
class Completion {
 public:
  Completion() = default;
  explicit Completion(std::function<void()> finish) : finish_(std::move(finish)) {}
  void wait() {
    if (!finish_) return;
    finish_();  // stays set after a failure, so that another wait() fails, too
    finish_ = nullptr;
  }

 private:
  std::function<void()> finish_;
};

/// A launched operation, for messages after a failure.
struct Operation {
  std::string_view kind;  // "gather", "reduction", "reduction over replicas", "replay", ...
  std::string first;      // of its parameters, or a program; its owner need not live as long
  size_t others = 0;      // parameters
  int64_t number = 0;     // since the start; the same on all ranks for the same operation
  int64_t sent = 0, received = 0;         // bytes that this rank has on either side
  int64_t created = 0, finished = 0;      // nanoseconds since 1970; finished is when that was seen, 0 if it was not
};

/// Collectives over one set of ranks, issued by all of them in the same order. Work is queued on the current stream of
/// the device. Gathers and reductions get a communicator each: two collectives of one NCCL communicator never overlap.
class Communicator {
 public:
  Communicator(int64_t rank, int64_t world_size) : rank_(rank), world_size_(world_size) {}
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// One group: the transfers travel together. Empty tensors are skipped.
  virtual Completion all_gather(const std::vector<Transfer>& group) = 0;
  virtual Completion reduce_scatter_mean(const std::vector<Transfer>& group) = 0;
  /// Here both sides are of one size, and may be the same tensor: `out` becomes the mean of everybody's `in`.
  virtual Completion all_reduce_mean(const std::vector<Transfer>& group) = 0;

  /// Whether wait() of a reduction queues a second collective, over other links: on a stream of its own, it runs beside
  /// the first collective of the next group.
  virtual bool reduces_in_two_stages() const { return false; }

  /// Whether this is the only rank: the result of a collective is `in`, which the caller may use instead of `out`.
  virtual bool is_alone() const { return false; }

  /// Whether gathers to memory of make_window() leave the device's thread blocks alone.
  virtual bool has_windows() const { return false; }
  /// Device memory of so many bytes on every rank, into which gathers may write. Collective, and waits for the device;
  /// all ranks ask for the same. Undefined, on all ranks, where one of them has no memory for it. Until close().
  virtual Tensor make_window(int64_t /*bytes*/) { return {}; }
  /// Or until this, which all ranks call in the same order; the device is idle.
  virtual void drop_window(const Tensor& /*window*/) {}

  /// Raises if the wire has failed since, for communicators that notice only in the background. Does not wait.
  virtual void check_health() {}
  /// For a watchdog, from its own thread and without waiting: why launched operations will not finish. Either the wire
  /// failed, or an operation has been the next one to finish for longer than `limit`. Empty: no failure, or failures are
  /// reported otherwise (process groups have timeouts of their own).
  virtual std::string diagnose(std::chrono::milliseconds /*limit*/) { return {}; }
  /// What was queued on the current stream last is a replay of the program `name`, in which this wire may be used: it is
  /// watched as an operation.
  virtual void watch_replay(std::string_view /*name*/) {}
  /// The last operations of every set of ranks that this is made of, under the set's name: "shards" or "replicas". Any
  /// thread, any time.
  virtual std::map<std::string, std::vector<Operation>> history() const { return {}; }
  /// Gives up: pending and later operations fail on this rank instead of waiting for a peer. Any thread, any time.
  virtual void abort() noexcept {}
  /// Orderly end, together with the peers; the device must be idle. Idempotent.
  virtual void close() {}
  /// As close(), for one rank at a time of its own choice: what has to wait for the peers is added to `pending`.
  virtual void retire(std::vector<std::future<void>>& /*pending*/) { close(); }

  int64_t rank() const { return rank_; }
  int64_t world_size() const { return world_size_; }

  /// "'a.weight', 'a.bias' and 3 more", for messages and profilers.
  static std::string names(const std::vector<Transfer>& group) {
    std::string text;
    constexpr size_t kShown = 4;
    for (size_t i = 0; i < group.size() && i < kShown; ++i) {
      text += c10::str(i == 0 ? "'" : ", '", group[i].name, "'");
    }
    return group.size() > kShown ? c10::str(text, " and ", group.size() - kShown, " more") : text;
  }

 private:
  int64_t rank_;
  int64_t world_size_;
};

/// Aborts all of them at the same time. What ends one waits for the device, which may be waiting inside another: aborted
/// one after another, none would come to an end.
void abort_together(std::initializer_list<Communicator*> communicators) noexcept;

}  // namespace ldc

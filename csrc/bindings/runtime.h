// The Runtime: everything one strategy has running below its programs. Two runtimes in a process share nothing but the
// table that maps a serial to a Runtime, through which operators find theirs.
//
// Threads: operators arrive from the main thread and from autograd's; a mutex admits one at a time (enter). Nothing here
// takes Python's interpreter lock, and every caller has released it, so waiting for the mutex or for a peer cannot
// deadlock with Python. `abort` alone does not take the mutex: it must get through while another thread is stuck in a
// collective.
//
// Lifetime: Python owns the Runtime (shared_ptr), the table holds a weak reference, an operator keeps it alive while it
// runs. close() ends it. A Runtime that is dropped without it aborts instead, since its peers may be gone. In a forked
// process it does not end at all.
#pragma once

#include <sys/types.h>

#include <map>
#include <memory>
#include <mutex>

#include "bindings/engines.h"
#include "bindings/faces.h"
#include "bindings/runtime_table.h"
#include "communicators/watchdog.h"

namespace ldc {

/// A thread's turn with the engines of a runtime: as long as it lasts, no other thread has one.
class Turn {
 public:
  Turn(std::mutex& mutex, Engines& engines) : lock_(mutex), engines_(&engines) {}
  Engines* operator->() const { return engines_; }
  Engines& operator*() const { return *engines_; }

 private:
  std::unique_lock<std::mutex> lock_;
  Engines* engines_;
};

class Runtime {
 public:
  /// Makes a runtime and enters it into the table. Collective: all ranks of the groups call it together. The first two
  /// groups have the same ranks, which share the parameters; `replica_group`, if there is one, those that hold the same
  /// shards as this rank: gradients are averaged over both.
  static std::shared_ptr<Runtime> create(Group gather_group, Group reduce_group, Group replica_group, Device device,
                                         const RuntimeOptions& options);
  /// The runtime that a parameter or graph id belongs to.
  static std::shared_ptr<Runtime> of(int64_t id) { return find_runtime(id); }

  Runtime(const Group& gather_group, const Group& reduce_group, const Group& replica_group, Device device,
          const RuntimeOptions& options, int64_t serial);
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  int64_t serial() const { return engines_.serial; }
  Device device() const { return engines_.device; }
  int64_t world_size() const { return engines_.gather_communicator->world_size(); }
  /// The last operations of gathers and reductions, under "gathers over shards", "reductions over replicas" and the like.
  /// Also of a runtime that has failed, from any thread.
  std::map<std::string, std::vector<Operation>> history() const;
  int64_t rank() const { return engines_.gather_communicator->rank(); }
  const std::string& communicator() const { return engines_.communicator_kind; }
  /// Whether this is what a forked process has of its parent's: it has no thread that this one's destructor could join,
  /// and CUDA does not work there. It must not be destroyed.
  bool is_copy() const;

  // What callers do with it, by purpose (faces.h).
  Setup setup{*this};
  Parameters parameters{*this};
  Gradients gradients{*this};
  Passes passes{*this};
  States states{*this};
  Graphs graphs{*this};
  Memory memory{*this};

  /// Waits for the engines. Raises after close() or abort().
  Turn enter();
  /// The same, also after these: for what cleans up.
  Turn enter_ended() { return {mutex_, engines_}; }
  /// Whether the dry mode is on (Passes::enable_profiling). Does not wait.
  bool is_profiling() const { return engines_.profiling; }

  std::map<std::string, int64_t> stats();  // readable after the end, too
  void reset_stats();

  /// A step was given up: forgets all graphs and what the step has left; parameters stay.
  void reset();
  /// Pending and later operations fail on this rank, instead of waiting for peers. Any thread, any time.
  void abort() noexcept;
  /// Ends the runtime together with its peers. Idempotent.
  void close();
  /// The same, but waits for the peers, which end it whenever they get to it, for `wait_seconds` at most. That counts
  /// from when this rank's device is idle: what was launched there ends with its peers, or by the watchdog. To give it
  /// up earlier would fail collectives that they still need.
  void close(double wait_seconds);

 private:
  enum class End { together, alone, aborted };
  std::vector<std::future<void>> end(End how);  // what `alone` leaves under way
  void fail(const std::string& reason) noexcept;  // the watchdog calls it

  const pid_t process_;
  std::mutex mutex_;
  std::atomic<bool> aborted_ = false;
  std::mutex failure_mutex_;
  std::string failure_;  // what the watchdog saw
  bool closed_ = false;
  Engines engines_;
  std::unique_ptr<Watchdog> watchdog_;  // destroyed before what it watches
};

}  // namespace ldc

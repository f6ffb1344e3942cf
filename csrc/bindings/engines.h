// The parts of one runtime: communicators, engines, and the executors of its graphs.
//
// They take no lock and do not check whether the runtime has ended. A Runtime owns them and gives them to one thread at a
// time (Runtime::enter).
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <future>
#include <map>
#include <memory>

#include "communicators/make_communicators.h"
#include "executors/executor.h"
#include "executors/offload.h"
#include "executors/recorder.h"
#include "executors/state_copies.h"

namespace ldc {

/// Where in a step we are.
struct Phase {
  bool forward = false;
  bool backward = false;
  bool boundary = true;        // the optimizer steps after this backward
  bool graphs_end_it = false;  // end_backward() completes the reductions; else finish_backward() does
  // A boundary's backward is over, or nothing has happened yet:
  bool new_weights = true;    // the next forward gathers again
  bool new_gradients = true;  // the next pass starts new accumulations
};

struct Engines {
  Engines(const Group& gather_group, const Group& reduce_group, const Group& replica_group, Device device,
          const RuntimeOptions& options, int64_t serial);
  Engines(const Engines&) = delete;
  Engines& operator=(const Engines&) = delete;

  /// The executor of a graph. Raises if the graph is not registered.
  Executor& executor(int64_t graph_id);
  /// The same for an instruction that belongs into a backward pass. Raises outside of one.
  Executor& executor_in_backward(std::string_view operation, int64_t graph_id);
  void check_in_backward(std::string_view operation) const;
  void check_serial(std::string_view operation, int64_t id) const;
  /// Raises what a communicator has noticed in the background.
  void check_health();
  std::string name_of(int64_t id) const;

  /// One graph's backward is over: its gradients are on the wire, and complete where graphs end the pass.
  void end_backward(int64_t graph_id);
  /// The weights changed: no gathered parameter is up to date.
  void invalidate();
  /// Frees the memory of large tensors, which become empty. Raises for one that the runtime uses.
  void free_tensors(const std::vector<Tensor>& tensors);
  /// The device is short of memory: gives some back, at no other rank's cost (memory/retry.h). Returns the bytes; 0:
  /// nothing is left to give.
  int64_t give_back();
  /// Frees unused device and host memory.
  void free_unused();
  /// Ends everything but communicators. From when `aborted` is set, nothing waits for the device.
  void clear(const std::atomic<bool>& aborted);

  const int64_t serial;
  const Device device;
  const std::string communicator_kind;
  const int64_t free_threshold;  // elements; free_tensors() leaves smaller tensors alone

  // Members are destroyed from the last to the first: executors, engines, then the wires that engines use.
  Stats stats;
  std::shared_ptr<Communicator> gather_communicator;
  std::shared_ptr<Communicator> reduce_communicator;
  Phase phase;
  std::atomic<bool> profiling = false;  // read without the mutex: Python reads it as a property, and holds its lock
  std::shared_ptr<HostMemory> host_memory;
  HostSlabs shard_slabs;
  Registry registry;
  GatherEngine gathers;
  ReduceEngine reductions;
  OffloadEngine offloads;
  StateCopies states;
  Recorder recorder{registry, gathers, reductions, stats, phase.boundary};
  std::map<int64_t, std::unique_ptr<Executor>> executors;
};

}  // namespace ldc

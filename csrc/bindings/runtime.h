// The Runtime: everything one strategy has running below its programs. Two runtimes in a process share nothing but the
// table that maps a serial to a Runtime, through which operators find theirs.
//
// Threads: operators arrive from the main thread and from autograd's; a mutex admits one at a time. Nothing here takes
// Python's interpreter lock, and every caller has released it, so waiting for the mutex or for a peer cannot deadlock
// with Python. `abort` alone does not take the mutex: it must get through while another thread is stuck in a
// collective.
//
// Lifetime: Python owns the Runtime (shared_ptr), the table holds a weak reference, an operator keeps it alive while it
// runs. close() ends it together with the peers, retire() without waiting for them. A Runtime that is dropped without
// either aborts instead, since its peers may be gone. In a forked process it does not end at all.
#pragma once

#include <sys/types.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <future>
#include <map>
#include <memory>
#include <mutex>

#include "bindings/runtime_table.h"
#include "communicators/make_communicators.h"
#include "communicators/watchdog.h"
#include "executors/executor.h"
#include "executors/offload.h"
#include "executors/state_copies.h"
#include "memory/host_shards.h"

namespace ldc {

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

  int64_t serial() const { return serial_; }
  Device device() const { return device_; }
  int64_t world_size() const { return gather_communicator_->world_size(); }
  int64_t rank() const { return gather_communicator_->rank(); }
  void share_shards();
  const std::string& communicator() const { return communicator_kind_; }
  /// Whether this is what a forked process has of its parent's: it has no thread that this one's destructor could join,
  /// and CUDA does not work there. It must not be destroyed.
  bool is_copy() const;

  void register_param(int64_t id, std::string name, std::vector<int64_t> shape, const Tensor& shard,
                      const std::optional<Tensor>& grad, Dtype reduce_dtype, bool persistent);
  void update_param_grad_buffer(int64_t id, const Tensor& grad);
  void set_persistent(int64_t id, bool persistent);
  void register_graph(int64_t graph_id, const Ids& ids, int64_t stage, const std::string& reduce);
  void validate_registration();

  // A strategy brackets its passes itself: it knows which gradients start anew, and when all graphs are done.
  void start_backward(const Ids& reset_ids, bool update);
  void finish_backward();
  Ids ids_with_grad();
  void free_grads(const Ids& ids);
  void invalidate();
  void refetch();
  void order_gathers();
  /// Whether a collective was launched that the compute stream has not been ordered behind: it may run beside what comes.
  bool communicates();

  // The lifecycle of the `dc` functions. start_backward(update) opens a pass whose graphs end one by one; gradients
  // start anew, and weights are gathered anew, in the step after an update.
  void start_forward();
  void end_forward();
  void start_backward(bool update);
  void end_backward(int64_t graph_id);  // also an operator
  void invalidate_gathered_param(int64_t id);
  void clear_all_gathered_params();
  void enable_profiling(bool enable);
  bool is_profiling() const { return profiling_; }
  void reset();

  // Shards that live in host memory; see HostShards.
  Tensor host_shard(int64_t numel, ScalarType dtype);

  // Optimizer states in host memory; see StateCopies.
  void reserve_states(const std::vector<int64_t>& sizes);
  Tensor state_home(const Tensor& like);
  void expect_states(std::vector<std::vector<Tensor>> chunks, std::vector<Ids> slots);
  std::vector<std::vector<Tensor>> take_states();
  void drop_states();
  void begin_states(int64_t slot_bytes);
  std::vector<Tensor> fetch_states(int64_t slot, const std::vector<Tensor>& homes);
  void await_states(int64_t slot);
  void stow_states(int64_t slot, const std::vector<Tensor>& sources, const std::vector<Tensor>& homes);
  void settle_states();
  void release_states();
  void synchronize_states();

  void clear_arena();
  /// The device is short of memory: gives some back, at no other rank's cost (memory/relief.h). Returns the bytes; 0:
  /// nothing is left to give.
  int64_t relieve();
  std::map<std::string, int64_t> stats();
  void reset_stats();
  void abort() noexcept;
  void close();
  /// As close(), but waits for the peers, which end it whenever they get to it, for `wait_seconds` at most. That counts
  /// from when this rank's device is idle: what was launched there ends with its peers, or by the watchdog. To give it
  /// up earlier would fail collectives that they still need.
  void retire(double wait_seconds);

  // The operators (see ops.cpp for their schemas).
  Tensor allgather_param(int64_t graph_id, int64_t id, Dtype dtype);
  Tensor wait_allgather(int64_t graph_id, int64_t id);
  void prefetch_params_fused(int64_t graph_id, const Ids& ids, const std::vector<Dtype>& dtypes);
  std::vector<Tensor> wait_allgather_fused(int64_t graph_id, const Ids& ids);
  void release_param(int64_t graph_id, int64_t id, int64_t n_users);
  void release_params_fused(int64_t graph_id, const Ids& ids);
  void release_params_at_boundary(int64_t graph_id, const Ids& ids);
  void reduce_grads_fused(int64_t graph_id, const Ids& ids, const std::vector<Tensor>& grads);
  void free_tensors(const std::vector<Tensor>& tensors);
  void reduce_grad(int64_t graph_id, int64_t id, const Tensor& grad);
  Tensor offload_tensor(const Tensor& tensor, int64_t graph_id, int64_t id);
  Tensor wait_offload(int64_t graph_id, int64_t id);
  Tensor reload_tensor(const Tensor& tensor, int64_t graph_id, int64_t id);
  Tensor wait_reload(int64_t graph_id, int64_t id);
  std::vector<Tensor> offload_tensors_fused(int64_t graph_id, const std::vector<Tensor>& tensors);
  std::vector<Tensor> reload_tensors_fused(int64_t graph_id, const std::vector<Tensor>& hosts);
  void wait_copies_fused(int64_t graph_id, const std::vector<Tensor>& hosts);
  void reload_states(int64_t graph_id, int64_t count);  // does nothing but in a boundary's backward
  void wait_states(int64_t graph_id, int64_t count);
  void offload_parameter(int64_t graph_id, int64_t id);
  void reload_parameter(int64_t graph_id, int64_t id);
  Tensor gather(const Tensor& shard, int64_t id, c10::IntArrayRef size, ScalarType dtype);
  Tensor reduce(const Tensor& grad, int64_t id, c10::IntArrayRef shard_size, ScalarType dtype);
  /// An empty tensor like the gathered parameter, for fake kernels.
  Tensor like_gathered(int64_t id, Dtype dtype);

 private:
  std::unique_lock<std::mutex> enter();  // the mutex; raises after close() or abort()
  Executor& executor(int64_t graph_id);
  std::string name_of(int64_t id) const;
  void check_in_backward(std::string_view operation) const;
  void check_health();
  void forget_gathered();
  int64_t give_back();
  void check_serial(std::string_view operation, int64_t id) const;
  enum class End { together, alone, aborted };
  std::vector<std::future<void>> shut_down(End end);  // what `alone` leaves under way
  void give_up(const std::string& reason) noexcept;

  /// Where in a step we are.
  struct Phase {
    bool forward = false;
    bool backward = false;
    bool boundary = true;        // the optimizer steps after this backward
    bool graphs_end_it = false;  // end_backward() completes the reductions; else finish_backward() does
    // A boundary's backward is over, or nothing has happened yet:
    bool new_weights = true;    // the next forward gathers anew
    bool new_gradients = true;  // the next pass starts new accumulations
  };

  const int64_t serial_;
  const pid_t process_;
  const Device device_;
  std::string communicator_kind_;
  std::mutex mutex_;
  std::atomic<bool> aborted_ = false;
  std::mutex failure_mutex_;
  std::string failure_;  // what the watchdog saw
  bool closed_ = false;

  // Members are destroyed from the last to the first: executors, engines, then the wires that engines use.
  Stats stats_;
  std::shared_ptr<Communicator> gather_communicator_;
  std::shared_ptr<Communicator> reduce_communicator_;
  Phase phase_;
  std::atomic<bool> profiling_ = false;  // read without the mutex: Python reads it as a property, and holds its lock
  const int64_t free_threshold_;
  std::shared_ptr<HostMemory> host_memory_;
  HostShards host_shards_;
  Registry registry_;
  GatherEngine gathers_;
  ReduceEngine reductions_;
  OffloadEngine offloads_;
  StateCopies states_;
  std::map<int64_t, std::unique_ptr<Executor>> executors_;
  std::unique_ptr<Watchdog> watchdog_;
};

}  // namespace ldc

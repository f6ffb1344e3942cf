// The runtime as Python sees it: what its callers want to do, one class for each purpose. What programs execute are the
// operators (ops.cpp).
//
// Each method is one turn with the engines (Runtime::enter). It raises after the runtime's end unless it says otherwise.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "base/common.h"

namespace ldc {

class Recording;
class Runtime;

/// What every purpose has: the runtime, whose member it is.
class Face {
 public:
  explicit Face(Runtime& runtime) : runtime_(runtime) {}
  Face(const Face&) = delete;
  Face& operator=(const Face&) = delete;

 protected:
  Runtime& runtime_;
};

/// Registration before the first step: parameters and graphs.
class Setup : public Face {
 public:
  using Face::Face;
  /// A parameter: its shard, and its gradient shard with memory, whose size is remembered. Without one it is frozen. A
  /// known id may come again with tensors like those before, which it replaces.
  void register_param(int64_t id, std::string name, std::vector<int64_t> shape, const Tensor& shard,
                      const std::optional<Tensor>& grad, Dtype reduce_dtype, bool persistent);
  /// A graph and the parameters that it uses, under a ZeRO stage. `reduce`: "every" micro-batch, at the "boundary", or
  /// empty: what the stage does. The same id again replaces the graph.
  void register_graph(int64_t graph_id, const Ids& ids, int64_t stage, const std::string& reduce);
  /// Raises on every rank if ranks registered different parameters or graphs. Collective.
  void validate();
  /// On one rank: parameters that are gathered as they are stored are their shards, and cost nothing.
  void share_shards();
};

/// Gathered parameters between graphs.
class Parameters : public Face {
 public:
  using Face::Face;
  /// Keeps a parameter gathered from its next use until the weights change.
  void set_persistent(int64_t id, bool persistent);
  /// The weights changed: no gathered parameter is up to date. With an id: that one is not.
  void invalidate(std::optional<int64_t> id);
  /// Starts gathering what invalidate() took from parameters that stay whole, in the order of their first use.
  void refetch();
  /// Gathers launched from now on see all earlier writes of the current stream. Gathers in flight are not affected.
  void order_gathers();
};

/// Gradient shards, and backward passes whose caller marks their begin and end: it knows which gradients start a new
/// accumulation, and when all graphs are done.
class Gradients : public Face {
 public:
  using Face::Face;
  /// Opens a backward pass. `reset_ids` start a new accumulation; without `update`, graphs that reduce at the boundary
  /// hold their gradients back.
  void start_backward(const Ids& reset_ids, bool update);
  /// Orders the current stream behind all reductions (CPU: completes them). Raises their failures.
  void finish_backward();
  /// Parameters whose gradient shard is valid, ascending.
  Ids ids();
  /// Gives a parameter another gradient buffer; the old one keeps its values.
  void replace(int64_t id, const Tensor& grad);
  /// Forgets accumulations; storages without any are resized to 0 bytes until the next reduction.
  void free(const Ids& ids);
};

/// The passes of the `dc` functions. Graphs end a backward one by one. In the step after an update, gradients start a new
/// accumulation and weights are gathered again.
class Passes : public Face {
 public:
  using Face::Face;
  void start_forward();
  void end_forward();
  void start_backward(bool update);
  void end_backward(int64_t graph_id);  // also an operator
  /// Dry run: the same shapes and memory, but no communication. Values are undefined.
  void enable_profiling(bool enable);
  bool is_profiling() const;  // does not wait for a turn
};

/// Optimizer states in host memory; see StateCopies, whose methods these are.
class States : public Face {
 public:
  using Face::Face;
  using Chunk = std::vector<Tensor>;
  void reserve(const std::vector<int64_t>& sizes);
  Tensor host_buffer(const Tensor& like);
  void expect(std::vector<Chunk> chunks, std::vector<Ids> slots);  // after the end, too
  std::vector<Chunk> take();
  void forget_fetched();  // after the end, too
  void begin(int64_t slot_bytes);
  Chunk fetch(int64_t slot, const Chunk& host_buffers);
  void wait(int64_t slot);
  void stow(int64_t slot, const Chunk& sources, const Chunk& host_buffers);
  // After the end, too: a step that failed is cleaned up, and states can still be saved.
  void settle();
  void release();
  void synchronize();
};

/// Programs that device graphs record and replay; see Recorder, whose methods these are.
class Graphs : public Face {
 public:
  using Face::Face;
  void begin();
  void prepare();
  void fork();
  std::shared_ptr<Recording> join();
  void cancel();  // after the end, too
  /// Whether what was recorded may be replayed.
  bool fits(const Recording& recording);
  /// A recording was replayed on the current stream; `program` is its name for a watchdog.
  void replayed(const Recording& recording, std::string_view program);
  void forget();  // after the end, too
};

/// Device and host memory.
class Memory : public Face {
 public:
  using Face::Face;
  /// A 1-D tensor of the device that lies in host memory, for the shards of parameters; uninitialised.
  Tensor host_shard(int64_t numel, ScalarType dtype);
  /// Turns tensors of at least `free_activation_threshold` elements into empty ones. Raises for one that is in use.
  void free_tensors(const std::vector<Tensor>& tensors);
  /// Frees unused device and host memory.
  void free_unused();
  /// The device is short of memory: gives some back, at no other rank's cost (memory/retry.h). Returns the bytes; 0:
  /// nothing is left to give.
  int64_t give_back();
  /// Bytes of windows (memory/windows.h), which torch does not count, of the smallest group that gets one (0: none does),
  /// and the digest of all that were taken.
  std::tuple<int64_t, int64_t, int32_t> windows();
  /// Frees windows and buffers of reductions that hold nothing, as the next schedule needs others. All ranks must call it
  /// between the same two gathers. Waits for the device.
  void free_buffers();
};

}  // namespace ldc

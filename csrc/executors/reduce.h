// The reduce engine: reduces whole gradients to gradient shards (the mean over ranks), on a stream of its own.
//
// reduce() takes a group of gradients: send buffers where needed (rows that do not divide by the ranks are padded with
// zeros; another dtype than the wire's; strides) → one group of reduce-scatters → into the parameters' `grad`, directly
// where a gradient of the same dtype starts its accumulation, else through staging and then one copy or add per run of
// neighbouring gradient shards. A rank that is alone merges what it would send.
//
// Order on the device, and what would break without it:
//   gradients written → reduce stream   an event of the compute stream, after new gradient memory was allocated from
//                                       its pool; else the reduction reads half-written gradients
//   reduction done → memory reused      a group keeps its incoming gradients referenced until the compute stream has
//                                       waited for the group. Dropped earlier, the allocator would hand their memory
//                                       to the next kernel while NCCL still reads it
//   reductions done → optimizer         drain(), in finish_backward()
// With replicas, the mean over them has a stream of its own, and the next group's reduce-scatter does not wait for it:
// each uses its own links. All that a group adds to gradients is queued on that stream.
// Single gradients (`collect`) gather in a bucket of at most `reduce_bucket_size` elements and travel as one group; a
// larger one travels alone. Groups are split where their send buffers would exceed that size. Until drain() a gradient
// that was handed to reduce() must not be written to; collect() and hold() copy theirs.
//
// Alternatively, hold() adds up unsharded gradients on this rank. They are reduced once, with the last micro-batch.
//
// At most `window` groups are pending, which bounds memory. The host never waits (on CPU, the caller does).
//
// Accumulation is kept per parameter, not per graph: tied weights and several graphs add up in the order of the calls.
// Groups finish in that order too (one stream; on CPU a queue), so an add never overtakes the copy before it.
#pragma once

#include <deque>
#include <memory>

#include "base/options.h"
#include "base/stats.h"
#include "communicators/communicator.h"
#include "executors/gradient_merge.h"
#include "executors/registry.h"
#include "executors/whole_gradients.h"
#include "memory/arena.h"

namespace ldc {

class ReduceEngine {
 public:
  ReduceEngine(Device device, std::shared_ptr<Communicator> communicator, Registry& registry, Stats& stats,
               const RuntimeOptions& options);

  /// Reduces a group of whole gradients. An id may come several times in a backward, also within one call.
  void reduce(const Ids& ids, const std::vector<Tensor>& grads);
  /// The same for a copy of one gradient, which may wait in the bucket for others. The caller may reuse the tensor.
  void collect(int64_t id, const Tensor& grad);
  /// Adds unsharded gradients to the sums that this rank holds. Later calls of reduce() and collect() include the sums.
  void hold(const Ids& ids, const std::vector<Tensor>& grads);
  /// Reduces what is held for these parameters (the last micro-batch had no gradient for them).
  void reduce_held(const Ids& ids);
  std::string_view any_held() const { return held_.any(); }
  /// Starts the reduction of the bucket.
  void flush();

  /// These parameters start a new accumulation: what their `grad` holds is void.
  void start_accumulation(const Ids& ids);

  /// The parameter gets other tensors: nothing of it is pending or held afterwards.
  void forget(int64_t id);

  /// Whether a gradient that reduce() keeps lies in this storage.
  bool owns(const c10::Storage& storage) const;

  /// Orders the current stream behind all pending reductions (CPU: completes them).
  void drain();

  Ids ids_with_grad() const;

  /// Forgets accumulations, held ones too, and gives back the memory of storages that hold none any more.
  void free_grads(const Ids& ids);

  /// A reduction outside any program: into a fresh shard that belongs to the caller, complete on return (in stream
  /// order). `wire`: dtype on the wire, by default the gradient's.
  Tensor reduce_now(const Tensor& grad, c10::IntArrayRef shard_size, ScalarType dtype, Dtype wire,
                    std::string_view name);

  /// A step was given up: waits for reductions in flight and forgets the rest. Does not raise.
  void reset() noexcept;

  /// Dry run: gradients are checked and dropped.
  void set_dry(bool dry) { dry_ = dry; }

  Arena& arena() { return arena_; }
  /// The device is short of memory: waits for reductions in flight, and frees their gradients and buffers. Returns the
  /// bytes.
  int64_t give_back();
  void retry_with(const GiveBack& give_back);
  void clear();  // drops everything; for the end of a runtime

  // For the recorder (recorder.h).
  /// Orders the engine's streams behind the current one, which then records them, too.
  void fork();
  /// Orders the current stream behind all queued work.
  void join();
  const WholeGradients::Sums& held() const { return held_.sums(); }
  void restore(WholeGradients::Sums held) { held_.restore(std::move(held)); }
  /// A recording has failed: nothing of what was queued will run.
  void cancel();

 private:
  struct Pending {
    std::vector<Tensor> kept;  // incoming gradients
    Arena::Lease buffers;      // back in the arena by now if all users are on one stream
    Completion completion;
    std::vector<Merge> merges;  // results → gradients
    Event done;
  };
  struct Plan;  // layout of one group's buffers

  void check(const Param& param, const Tensor& grad) const;
  std::vector<Gradient> gradients(const Ids& ids, const std::vector<Tensor>& grads);
  bool travels_as_is(const Gradient& gradient) const;
  void reduce(std::vector<Gradient> gradients);
  void reduce_group(const std::vector<Gradient>& group);
  Plan make_plan(const std::vector<Gradient>& group) const;
  void finish(Pending& pending);  // completes the wire and merges, on the current stream
  void release_buffers(Pending& pending);
  void order_behind_reductions(const Stream& stream);
  void pop();
  void drop_pending();  // their results are not wanted

  Device device_;
  std::shared_ptr<Communicator> communicator_;
  Registry& registry_;
  Stats& stats_;
  size_t window_;
  int64_t bucket_size_;  // elements; 0: no bound
  bool sync_before_, sync_after_;
  bool dry_ = false;
  Stream stream_;         // of reduce-scatters
  Stream result_stream_;  // of what follows them; the same without replicas
  Arena arena_;  // separate from the gathers': slots of one arena would tie the two streams together
  Event compute_;
  GiveBack give_back_;
  std::vector<Event> spare_events_;
  std::deque<Pending> pending_;
  std::vector<Gradient> bucket_;
  int64_t bucket_elements_ = 0;
  WholeGradients held_;
  std::unique_ptr<GradientMerge> merge_;
};

}  // namespace ldc

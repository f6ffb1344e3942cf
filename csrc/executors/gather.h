// The gather engine: gathers whole parameters from their shards, on a stream of its own.
//
// A parameter is absent, in flight, or ready (waited for). `launch` takes the absent ones of a list as one group: one
// arena slot, few cast kernels, one group of collectives that write every parameter to its final place, one event. A
// shard that needs a cast is cast into its place in the gathered parameter and sent from there. This needs no other
// memory, and a single rank needs no collective.
//
// Order on the device, and what would break without it:
//   slot free → gather stream     the arena; else weights that are still being read get overwritten
//   shards written → gather       `refresh_`: the first gather, and the first after invalidate(), waits for the compute
//                                 stream; else a gather reads weights that the optimizer is still writing
//   shard back from host → gather the parameter's `arriving` event
//   shards written → host copy    shards that live in host memory are copied to a slot of the arena by a stream of their
//                                 own, which waits at `refresh_`, too
//   host copy → gather            fetch_shards(); the slot goes back to the arena when the next one is taken, so that
//                                 the next group's copy runs beside this group's gather
//   gather done → compute stream  the slot's `ready` event, in wait()
//   last use → slot free          recorded when the last parameter of a slot is released
//   last use → copy to the host   both on the compute stream; the host waits for the copy (give_back)
//
// Some parameters stay gathered until the weights change: persistent ones, and all parameters at stages 1 and 2.
// refetch() gathers them again, all at once and in the order of their first use: later groups travel while earlier ones
// are used.
//
// All operations of a runtime come from one compute stream at a time (autograd runs backward on the forward's stream).
#pragma once

#include <memory>
#include <unordered_map>

#include "base/options.h"
#include "base/stats.h"
#include "communicators/communicator.h"
#include "executors/registry.h"
#include "memory/arena.h"
#include "memory/views.h"

namespace ldc {

class GatherEngine {
 public:
  GatherEngine(Device device, std::shared_ptr<Communicator> communicator, Registry& registry, Stats& stats,
               const RuntimeOptions& options);

  /// Starts gathering those of `ids` that are absent. `dtypes` is empty or has one entry per id; an empty entry means
  /// the shard's dtype. A parameter that is already gathered as another dtype is an error.
  void launch(const Ids& ids, const std::vector<Dtype>& dtypes);

  /// A placeholder with the shape, dtype and device of the result, over one element of memory: NaN where the dtype has it.
  Tensor placeholder(int64_t id);

  /// Makes the current stream (CPU: the calling thread) wait until the parameter is there; once per group. Returns the
  /// whole parameter, in runtime memory: valid until it is released.
  Tensor wait(int64_t id);
  /// The same, in memory that belongs to the caller.
  Tensor copy(int64_t id);

  /// The current stream has seen the last use. Absent and persistent parameters are left alone.
  void release(int64_t id);

  /// The use is over, but the parameter stays until the weights change.
  void keep(int64_t id);

  /// The weights changed: forgets every gathered parameter. Remembers the order of kept ones, for refetch(). Orders the
  /// current stream behind gathers in flight, and the next gather behind the current stream.
  void invalidate();
  /// The same for one parameter, which is not remembered.
  void invalidate(int64_t id);
  /// Gathers launched from now on see all earlier writes of the current stream. Gathers in flight are not affected.
  void order_behind_current_stream();

  /// Starts gathering what the last invalidate() took from parameters that were kept: the same groups in the same
  /// order on every rank, as they follow from the gathers that all ranks made together.
  void refetch();
  void forget_kept() { refetch_.clear(); }

  bool is_gathered(int64_t id) const { return gathered_.contains(id); }
  /// Makes work queued on `stream` from now on wait until all gathers so far have read their shards. CPU: waits itself.
  void order_behind_gathers(const Stream& stream);
  /// Whether gathered parameters live in this storage.
  bool owns(const c10::Storage& storage) const;

  /// From now on a single rank uses its shard as the gathered parameter where no cast is needed.
  void share_shards() { shares_ = communicator_->world_size() == 1; }

  /// Dry run: the same shapes and memory, but no communication. Contents are undefined.
  void set_dry(bool dry);

  /// A gather outside any program: into fresh memory that belongs to the caller, complete on return (in stream order).
  Tensor gather_now(const Tensor& shard, c10::IntArrayRef size, ScalarType dtype, std::string_view name);

  Arena& arena() { return arena_; }
  /// Null where there are none.
  const Windows* windows() const { return windows_.get(); }
  /// Frees windows that hold nothing. All ranks must call it between the same two gathers.
  void free_windows() {
    if (windows_) windows_->free_unused();
  }
  void drop_windows() { windows_.reset(); }  // before the communicator ends, which made them
  /// The device is short of memory: frees the arena's slots; if there are none, sends one group of parameters that
  /// nobody reads at the moment to host memory, until the next wait for it. Returns the bytes, 0 if nothing is left.
  int64_t give_back();
  void retry_with(const GiveBack& give_back);
  void clear();  // drops everything; for the end of a runtime

  // For the recorder (recorder.h).
  /// The gathered parameters whose memory belongs to device graphs.
  struct Left {
    struct Member {
      int64_t id;
      Tensor full;
      bool kept;
    };
    struct Part {
      Tensor bytes;
      Stream allocated_on;
      std::vector<Member> members;
    };
    std::vector<Part> parts;  // in the order of their launch
    size_t size = 0;          // members
  };
  /// Whether the memory of all gathered parameters belongs to device graphs.
  bool is_recorded() const;
  /// Orders the engine's streams behind the current one, so that it records them, too.
  void fork();
  /// Orders the current stream behind all queued work. The recording then owns the memory of gathered parameters.
  void join();
  Left left() const;
  bool has(const Left& left) const;
  /// Sets the state after a replay: the same as at the end of its recording.
  void restore(const Left& left);
  /// A recording has failed: nothing of what was queued will run.
  void cancel();
  /// From now on graphs gather the parameters that stay gathered; none are gathered ahead. All ranks must call it
  /// between the same two gathers.
  void leave_to_graphs(bool leave) { left_to_graphs_ = leave; }

 private:
  struct Group {
    Arena::Lease slot;     // the gathered parameters; empty while they are `away`, and where they are shards
    Tensor away;           // the same in host memory, where give_back() sent them
    Arena::Lease fetched;  // shards that came from host memory; on devices with streams the engine keeps it
    Completion completion;
    bool waited = false;
    int64_t resident = 0;  // members that are not released yet
    int64_t number = 0;    // groups are numbered as they are launched
  };
  struct Gathered {
    std::shared_ptr<Group> group;
    Tensor full;  // of the parameter's own shape
    bool kept = false;
  };
  struct Request {
    Ids ids;
    std::vector<Dtype> dtypes;
  };

  const Gathered& launched(int64_t id) const;
  /// Selects what launch() has to gather, and checks the rest.
  void select(const Ids& ids, const std::vector<Dtype>& dtypes, std::vector<Param*>& params,
              std::vector<ScalarType>& targets);
  /// Marks those of the lists that need no gather as gathered, and removes them from the lists.
  void share(std::vector<Param*>& params, std::vector<ScalarType>& targets);
  /// The shards, on the device: copies of those that live in host memory, valid on the gather stream.
  std::vector<Tensor> fetch_shards(const std::vector<Param*>& params, Arena::Lease& fetched);
  /// Sends from this rank's part of the gathered parameter: for shards that need a cast, or for all. Returns the copies
  /// that fill it.
  std::vector<Copy> place_shards(std::vector<Transfer>& transfers, bool all) const;
  /// Gives the slot of the last copies from host memory back to the arena.
  void release_fetched();
  void complete(Group& group);
  std::vector<Gathered*> members(const Group& group);
  /// Makes the parameters views of `memory`, which has the contents of the slot.
  static void move_views(const std::vector<Gathered*>& gathered, const Tensor& memory);
  int64_t send_away(Group& group);
  void bring_back(Group& group);
  std::vector<Request> kept_groups() const;  // in the order of their launch
  void release_entry(std::unordered_map<int64_t, Gathered>::iterator entry);

  Device device_;
  std::shared_ptr<Communicator> communicator_;
  Registry& registry_;
  Stats& stats_;
  bool sync_before_, sync_after_;
  std::shared_ptr<Windows> windows_;  // of large groups; null: of none
  bool dry_ = false;
  bool shares_ = false;
  Stream stream_;
  Stream copies_;  // from host memory
  Arena arena_;
  Event compute_;        // scratch: a point in the compute stream
  GiveBack give_back_;
  bool refresh_ = true;  // shards may have been written since the gather stream last waited for the compute stream
  std::unordered_map<int64_t, Gathered> gathered_;
  int64_t launched_ = 0;           // groups so far
  std::vector<Request> refetch_;
  bool left_to_graphs_ = false;
  Arena::Lease fetched_;  // of the last group that had shards in host memory
};

}  // namespace ldc

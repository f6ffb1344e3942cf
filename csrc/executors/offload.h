// The offload engine: tensors and shards that wait in host memory, copied out and in on streams of their own.
//
// A tensor: offload → wait_offload → reload → wait_reload. Saved activations go the same way in groups, and without
// ids: each host tensor holds the event to wait for, so a program may run again before its backward program does.
// A parameter's shard: offload_param frees the shard's memory once it is copied, reload_param brings it back; what has
// not changed since is not copied out again.
//
// Order on the device, and what would break without it:
//   source written → copy out       an event of the compute stream
//   copy out → source freed         a single tensor is copied on the device first, and the engine holds that copy until
//                                   the compute stream has waited (wait_offload), as its memory returns to that
//                                   stream's pool; of a group it holds the tensors themselves
//   copy out → copy in              the entry's `done` event
//   target free → copy in           targets come from the compute stream's pool, which may still be using them
//   copy in → target read           wait_reload; gathers wait for the shards that they read themselves
//   gather → shard freed            the copy-out stream waits for the gather stream
// On a device without streams every copy is finished when its call returns.
#pragma once

#include <memory>
#include <unordered_map>

#include "executors/gather.h"
#include "memory/host_pool.h"

namespace ldc {

class OffloadEngine {
 public:
  OffloadEngine(Device device, Registry& registry, GatherEngine& gathers, Stats& stats,
                std::shared_ptr<HostMemory> memory);

  /// Starts copying to the host; returns a host tensor like the one that wait_offload() will return, without its values.
  /// The caller may reuse the source.
  Tensor offload(const Tensor& tensor, int64_t id);
  /// The host tensor, to be read after a device synchronisation, and not to be written to before wait_reload().
  Tensor wait_offload(int64_t id);
  /// Starts copying back what wait_offload(id) or offload(id) returned; returns a device tensor with the same values as
  /// wait_reload()'s, from then on.
  Tensor reload(const Tensor& host, int64_t id);
  /// The device tensor; it belongs to the caller.
  Tensor wait_reload(int64_t id);
  /// Whether this storage is the host memory or the target of a single offloaded tensor.
  bool owns(const c10::Storage& storage) const;

  /// Starts copying a group of tensors to the host. Their memory stays in use until wait_copies(). A tensor whose
  /// strides a copy cannot keep stays on the device and is returned itself. So is one for which the host has no memory:
  /// an error would end the step, and other ranks wait for it.
  std::vector<Tensor> offload_group(const std::vector<Tensor>& tensors);
  /// Starts copying back what offload_group() returned; to be used after wait_copies() of the same host tensors.
  std::vector<Tensor> reload_group(const std::vector<Tensor>& hosts);
  /// The current stream waits for the last copies of `hosts`; what was copied out may be used for something else.
  void wait_copies(const std::vector<Tensor>& hosts);

  /// Starts copying a shard to the host; its memory is freed when that is done, at one of the next calls.
  void offload_param(int64_t id);
  void reload_param(int64_t id);
  /// The parameter gets another shard.
  void forget(int64_t id) { shards_.erase(id); }
  /// The weights changed: copies on the host are out of date.
  void invalidate();
  /// Frees the shards whose copies are done. Does not wait.
  void free_departed();
  /// Orders the current stream behind all copies of shards and frees those that left.
  void settle();

  void retry_with(GiveBack give_back) { give_back_ = std::move(give_back); }
  int64_t host_bytes() const { return pool_->bytes(); }
  void free_unused();
  /// Waits for copies in flight and drops their results; shards come back. For the end of a step that was given up.
  void reset();
  void clear();  // drops everything; for the end of a runtime

 private:
  struct Entry {
    Tensor source;         // a copy of the caller's, until the compute stream has waited for the copy to the host
    HostPool::Lease host;
    const void* promised = nullptr;  // address of offload()'s result, which reload() takes like wait_offload()'s
    Tensor target;         // set by reload()
    Event done;
  };
  enum class Place { device, leaving, host };
  struct Shard {
    HostPool::Lease copy;
    std::optional<uint32_t> version;  // of the shard when it was equal to `copy`
    Place place = Place::device;
    int64_t bytes = 0;
    std::shared_ptr<Event> done = std::make_shared<Event>();
  };

  Entry& entry(std::string_view operation, int64_t id);
  void check_own_storage(const Param& param) const;
  void copy_out(const Tensor& source, HostPool::Lease& host, Event& done);
  void copy_in(const Tensor& target, HostPool::Lease& host, Event& done);
  Tensor device_tensor_like(const Tensor& host) const;
  static std::optional<uint32_t> version_of(const Tensor& tensor);
  void free_shard(int64_t id, Shard& shard);

  Device device_;
  Registry& registry_;
  GatherEngine& gathers_;
  Stats& stats_;
  Stream out_, in_;
  std::shared_ptr<HostPool> pool_;
  bool short_ = false;  // the host had no memory for a group, which has been said
  Event scratch_;
  GiveBack give_back_;
  std::unordered_map<int64_t, Entry> entries_;
  std::unordered_map<int64_t, Shard> shards_;
};

}  // namespace ldc

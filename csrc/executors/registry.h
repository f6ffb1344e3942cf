// The runtime's data of each parameter.
#pragma once

#include <algorithm>
#include <memory>
#include <unordered_map>

#include "base/common.h"

namespace ldc {

/// Shapes that a shard may have. Either way the memory of all shards, one after the other, starts with the parameter:
/// row shards hold whole rows, ceil(rows / world) of them; flat shards hold ceil(numel / world) elements. What lies
/// behind the parameter is padding.
std::vector<int64_t> row_shard_shape(c10::IntArrayRef shape, int64_t world_size);
std::vector<int64_t> flat_shard_shape(c10::IntArrayRef shape, int64_t world_size);

/// One parameter and this rank's part of it.
struct Param {
  int64_t id = 0;
  std::string name;
  std::vector<int64_t> shape;  // of the whole parameter
  int64_t numel = 0;           // of the whole parameter, without padding
  Tensor shard;                // memory owned by the caller, read by gathers
  Tensor host;                 // the same memory, if it is the host's; else undefined. See host_shards.h
  Tensor grad;                 // like the shard; written by reductions. Its storage may hold 0 bytes between steps.
                               // Undefined: the parameter is frozen
  std::shared_ptr<Event> arriving;  // the shard may be read after it: it comes back from the host. Null: it is there
  Dtype reduce_dtype;          // dtype of a gradient on the wire
  bool persistent = false;     // stays gathered until the weights change
  bool has_grad = false;       // `grad` holds an accumulation: the next reduction adds to it. Else: it overwrites

  bool even(int64_t world_size) const { return shard.numel() * world_size == numel; }
};

/// A storage that holds gradients of several parameters. It is freed and allocated as a whole.
struct GradStorage {
  c10::Storage storage;
  size_t bytes = 0;  // full size, remembered since the storage may be empty at the moment
  Ids ids;
};

class Registry {
 public:
  Registry(Device device, int64_t world_size) : device_(device), world_size_(world_size) {}

  /// Raises what add() raises for such arguments; changes nothing.
  void check(int64_t id, const std::string& name, const std::vector<int64_t>& shape, const Tensor& shard,
             const Tensor& grad, Dtype reduce_dtype) const;

  /// Validates and stores one parameter. `grad` is undefined for frozen parameters; else it must have its memory at
  /// this moment: its size is remembered. A known id may come again with tensors like those before, which it replaces.
  /// What is refused changes nothing.
  void add(int64_t id, std::string name, std::vector<int64_t> shape, const Tensor& shard, const Tensor& grad,
           Dtype reduce_dtype, bool persistent);

  bool contains(int64_t id) const { return params_.contains(id); }
  Param& at(int64_t id);
  const std::unordered_map<int64_t, Param>& params() const { return params_; }

  /// Makes sure that the gradient has memory. New memory comes from the current stream's pool, so reductions must be
  /// ordered behind that stream afterwards.
  void allocate_grad(const Param& param);

  /// Gives the memory of gradient storages back in which no parameter has a gradient any more. The current stream must
  /// be ordered behind every write to them.
  void free_unused_grads(const Ids& ids);

  /// Sets whether gradients keep their memory between steps: device graphs write to it.
  void keep_grads(bool keep) { keeps_grads_ = keep; }
  /// A number that changes when shards or gradients move to other addresses.
  int64_t addresses() const { return addresses_; }

  /// Gives one parameter another gradient buffer, so that references to the old one keep its values. After an error the
  /// parameter has the old one.
  void replace_grad(int64_t id, const Tensor& grad);

  /// Whether no parameter's gradient lies in [begin, end), counted in elements, of a gradient storage.
  bool is_free(const c10::Storage& storage, int64_t begin, int64_t end) const;

  /// Whether a shard or a gradient lives in this storage.
  bool owns(const c10::Storage& storage) const;

  /// Whether another parameter's shard lives in the same storage.
  bool shares_storage(const Param& param) const;

  Ids ids() const;  // ascending
  void clear();

 private:
  void adopt_grad(Param& param, const Tensor& grad);  // which was checked
  void disown_grad(const Param& param);

  Device device_;
  int64_t world_size_;
  std::unordered_map<int64_t, Param> params_;  // references stay valid while others are added
  std::unordered_map<const c10::StorageImpl*, GradStorage> grad_storages_;
  bool keeps_grads_ = false;
  int64_t addresses_ = 0;
};

}  // namespace ldc

#include "executors/registry.h"

#include <c10/util/accumulate.h>

#include "memory/host_shards.h"
#include "memory/views.h"

namespace ldc {

std::vector<int64_t> row_shard_shape(Shape shape, int64_t world_size) {
  auto shard = shape.empty() ? std::vector<int64_t>{1} : shape.vec();
  shard[0] = (shard[0] + world_size - 1) / world_size;
  return shard;
}

std::vector<int64_t> flat_shard_shape(Shape shape, int64_t world_size) {
  return {(c10::multiply_integers(shape) + world_size - 1) / world_size};
}

namespace {

/// Whether a gradient's storage can be freed between steps and allocated again.
void check_storage(const Tensor& grad, std::string_view name) {
  const c10::Storage& storage = grad.storage();
  LDC_CHECK_ARG(storage.resizable() && storage.allocator() != nullptr, "'", name,
                "': the storage of `grad` cannot be resized. Allocate it with torch.zeros or torch.empty.");
  LDC_CHECK_ARG(grad.numel() == 0 || storage.nbytes() > 0, "'", name,
                "': the storage of `grad` is empty. Hand it over before its memory is freed.");
}

}  // namespace

void Registry::check(int64_t id, const std::string& name, const std::vector<int64_t>& shape, const Tensor& shard,
                     const Tensor& grad, Dtype reduce_dtype) const {
  LDC_CHECK_ARG(std::none_of(shape.begin(), shape.end(), [](int64_t size) { return size < 0; }), "register_param: '",
                name, "': sizes must not be negative, got ", Shape(shape), ".");
  const auto rows = row_shard_shape(shape, world_size_), flat = flat_shard_shape(shape, world_size_);
  const auto check_tensor = [&](const Tensor& tensor, std::string_view argument) {
    LDC_CHECK_ARG(tensor.defined(), "register_param: '", name, "': `", argument, "` is None.");
    LDC_CHECK_ARG(tensor.sizes() == Shape(rows) || tensor.sizes() == Shape(flat), "register_param: '", name,
                  "' of shape ", Shape(shape), " over ", world_size_, " ranks needs a `", argument, "` of shape ",
                  Shape(rows), " or ", Shape(flat), ", got ", tensor.sizes(), ".");
    LDC_CHECK_ARG(tensor.device() == device_, "register_param: '", name, "': `", argument, "` is on ",
                  tensor.device(), ", the runtime on ", device_, ".");
    LDC_CHECK_ARG(!tensor.unsafeGetTensorImpl()->is_python_dispatch(), "register_param: '", name, "': `", argument,
                  "` is a tensor subclass. Pass the local tensor.");
    LDC_CHECK_ARG(tensor.layout() == c10::kStrided && tensor.is_contiguous(), "register_param: '", name, "': `",
                  argument, "` must be dense and contiguous.");
  };
  check_tensor(shard, "shard");
  LDC_CHECK_ARG(!reduce_dtype || c10::isFloatingType(*reduce_dtype) || c10::isComplexType(*reduce_dtype),
                "register_param: '", name, "': `reduce_dtype` must be a floating dtype, got ", *reduce_dtype, ".");
  if (grad.defined()) {
    check_tensor(grad, "grad");
    LDC_CHECK_ARG(grad.sizes() == shard.sizes() && (grad.is_floating_point() || grad.is_complex()),
                  "register_param: '", name, "': `grad` must be a floating tensor of the shard's shape ",
                  shard.sizes(), ", got ", grad.scalar_type(), " of shape ", grad.sizes(), ".");
    check_storage(grad, name);
  }
  if (const auto known = params_.find(id); known != params_.end()) {
    const Param& other = known->second;
    LDC_CHECK_ARG(other.name == name && other.shape == shape && other.shard.sizes() == shard.sizes() &&
                      other.shard.scalar_type() == shard.scalar_type(),
                  "register_param: id ", id, " of '", name, "' (", shard.scalar_type(), " ", Shape(shape),
                  ") is already taken by '", other.name, "' (", other.shard.scalar_type(), " ", Shape(other.shape),
                  "). Give every parameter its own id.");
  }
}

void Registry::add(int64_t id, std::string name, std::vector<int64_t> shape, const Tensor& shard, const Tensor& grad,
                   Dtype reduce_dtype, bool persistent) {
  check(id, name, shape, shard, grad, reduce_dtype);
  Param param;
  param.id = id;
  param.name = std::move(name);
  param.shape = std::move(shape);
  param.numel = c10::multiply_integers(param.shape);
  param.shard = shard.detach();
  param.host = host_of(param.shard);
  param.reduce_dtype = reduce_dtype;
  param.persistent = persistent;
  if (const auto known = params_.find(id); known != params_.end()) {
    disown_grad(known->second);
    params_.erase(known);
  }
  if (grad.defined()) adopt_grad(param, grad);
  params_.emplace(id, std::move(param));
  ++addresses_;
}

void Registry::adopt_grad(Param& param, const Tensor& grad) {
  const c10::Storage& storage = grad.storage();
  param.grad = grad.detach();
  auto& entry = grad_storages_.try_emplace(storage.unsafeGetStorageImpl(), GradStorage{storage, 0, {}}).first->second;
  entry.bytes = std::max(entry.bytes, storage.nbytes());
  entry.ids.push_back(param.id);
}

void Registry::replace_grad(int64_t id, const Tensor& grad) {
  Param& param = at(id);
  LDC_CHECK_ARG(grad.defined() && grad.sizes() == param.shard.sizes() && grad.is_contiguous() &&
                    grad.scalar_type() == (param.grad.defined() ? param.grad : param.shard).scalar_type() &&
                    grad.device() == device_,
                "update_param_grad_buffer: '", param.name, "' needs a contiguous buffer like its shard, of shape ",
                param.shard.sizes(), " on ", device_, ".");
  check_storage(grad, param.name);
  disown_grad(param);
  adopt_grad(param, grad);
  param.has_grad = false;
  ++addresses_;
}

void Registry::disown_grad(const Param& param) {
  if (!param.grad.defined()) return;
  const auto entry = grad_storages_.find(param.grad.storage().unsafeGetStorageImpl());
  std::erase(entry->second.ids, param.id);
  if (entry->second.ids.empty()) grad_storages_.erase(entry);
}

bool Registry::is_free(const c10::Storage& storage, int64_t begin, int64_t end) const {
  const auto entry = grad_storages_.find(storage.unsafeGetStorageImpl());
  if (entry == grad_storages_.end()) return false;
  return std::none_of(entry->second.ids.begin(), entry->second.ids.end(), [&](int64_t id) {
    const Tensor& other = params_.at(id).grad;
    return other.storage_offset() < end && begin < other.storage_offset() + other.numel();
  });
}

Param& Registry::at(int64_t id) {
  const auto found = params_.find(id);
  LDC_CHECK_ARG(found != params_.end(), "parameter id ", id, " (local ", id & 0xffffffff,
                ") is not registered with this runtime. Call register_param (register_z3_param) first.");
  return found->second;
}

void Registry::allocate_grad(const Param& param) {
  const c10::Storage& storage = param.grad.storage();
  if (storage.nbytes() > 0) return;
  const size_t bytes = grad_storages_.at(storage.unsafeGetStorageImpl()).bytes;
  if (bytes == 0) return;
  reallocate(storage, bytes, device_);
  ++addresses_;
}

void Registry::free_unused_grads(const Ids& ids) {
  if (keeps_grads_) return;
  for (const int64_t id : ids) {
    if (!at(id).grad.defined()) continue;
    const c10::Storage& storage = at(id).grad.storage();
    if (storage.nbytes() == 0) continue;
    const Ids& sharing = grad_storages_.at(storage.unsafeGetStorageImpl()).ids;
    const bool in_use = std::any_of(sharing.begin(), sharing.end(), [&](int64_t other) { return at(other).has_grad; });
    if (in_use) continue;
    reallocate(storage, 0, device_);
    ++addresses_;
  }
}

bool Registry::owns(const c10::Storage& storage) const {
  return grad_storages_.contains(storage.unsafeGetStorageImpl()) ||
         std::any_of(params_.begin(), params_.end(),
                     [&](const auto& entry) { return entry.second.shard.storage().is_alias_of(storage); });
}

bool Registry::shares_storage(const Param& param) const {
  return std::any_of(params_.begin(), params_.end(), [&](const auto& entry) {
    return entry.first != param.id && entry.second.shard.storage().is_alias_of(param.shard.storage());
  });
}

Ids Registry::ids() const {
  Ids ids;
  for (const auto& [id, param] : params_) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  return ids;
}

void Registry::clear() {
  params_.clear();
  grad_storages_.clear();
}

}  // namespace ldc

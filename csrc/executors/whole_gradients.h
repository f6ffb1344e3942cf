// Gradients accumulated whole, on this rank alone, until the optimizer step's last micro-batch.
//
// Sums have the dtype of the parameter's gradient shard, as sums of reduced micro-batches have; they travel in the
// dtype that the gradients came in (or `reduce_dtype`). Everything runs on the compute stream. State per parameter, so
// that tied weights, several graphs and recompiles between micro-batches add up.
#pragma once

#include <map>

#include "executors/registry.h"
#include "memory/retry.h"

namespace ldc {

/// A whole gradient on its way to its parameter's shard.
struct Gradient {
  Param* param;
  Tensor value;
  ScalarType wire;  // dtype in which it travels
};

class WholeGradients {
 public:
  /// Adds to the sums; while there is no memory for new ones, `give_back` is asked for some.
  void add(const std::vector<Gradient>& gradients, const GiveBack& give_back);
  /// The gradient plus its parameter's sum, which is taken out.
  Gradient complete(Gradient last);
  /// Takes the sums of those of `ids` that have one, by ascending id.
  std::vector<Gradient> take(Ids ids);
  void forget(const Ids& ids);
  void clear() { sums_.clear(); }
  using Sums = std::map<int64_t, Gradient>;
  const Sums& sums() const { return sums_; }
  void restore(Sums sums) { sums_ = std::move(sums); }
  /// Name of a parameter with a sum; empty if there is none.
  std::string_view any() const { return sums_.empty() ? std::string_view() : sums_.begin()->second.param->name; }

 private:
  Sums sums_;
};

}  // namespace ldc

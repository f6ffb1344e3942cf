// The executor of one graph: runs a program's instructions under a ZeRO stage.
//
// The engines gather and reduce. A stage is two policies over them: residency (whether a parameter stays gathered after
// its last use) and reduction (when a gradient is reduced). State that outlives a graph (gathered parameters,
// accumulated gradients) belongs to the engines, as several graphs may use one parameter.
#pragma once

#include <memory>
#include <unordered_map>
#include <unordered_set>

#include "executors/gather.h"
#include "executors/reduce.h"

namespace ldc {

/// When gradients are reduced: in every micro-batch, or added up unsharded and reduced in the last one.
enum class Reduction { every_micro_batch, at_boundary };

class Executor {
 public:
  /// `boundary` says whether the backward under way is the last one before the optimizer steps.
  Executor(int64_t graph_id, const Ids& ids, Reduction reduction, const bool& boundary, Registry& registry,
           GatherEngine& gathers, ReduceEngine& reductions);
  virtual ~Executor() = default;
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// Starts gathering what is absent, as one group. `dtypes`: empty, or one entry per id.
  void prefetch(const Ids& ids, const std::vector<Dtype>& dtypes);
  /// The same for one parameter; returns the handle for wait_copy().
  Tensor allgather(int64_t id, Dtype dtype);
  std::vector<Tensor> wait(const Ids& ids);
  /// The same for one parameter, in memory that belongs to the caller.
  Tensor wait_copy(int64_t id);
  /// One of `n_users` uses is over; the last one releases.
  void release_use(int64_t id, int64_t n_users);
  void release(const Ids& ids);
  /// The same, but only in the last backward before the optimizer steps: until then they stay for the next micro-batch.
  void release_at_boundary(const Ids& ids);
  /// A group of gradients; one gradient, which may travel together with others.
  void reduce(const Ids& ids, const std::vector<Tensor>& grads);
  void reduce(int64_t id, const Tensor& grad);
  /// Raises for a parameter that does not belong to the graph.
  void check_members(const Ids& ids) const;
  /// Starts all reductions of this backward that reduce() has collected so far.
  void end_backward();
  /// The weights changed or a step was given up: state that spans instructions starts over.
  void reset() { uses_left_.clear(); }

  virtual int64_t stage() const = 0;
  Reduction reduction() const { return reduction_; }
  const Ids& ids() const { return ids_; }

 protected:
  virtual void release_one(int64_t id) = 0;

  GatherEngine& gathers_;

 private:
  struct UseCount {
    int64_t users;
    int64_t left;
  };
  bool holds_gradients() const { return reduction_ == Reduction::at_boundary && !boundary_; }

  int64_t graph_id_;
  Ids ids_;
  std::unordered_set<int64_t> members_;
  Reduction reduction_;
  const bool& boundary_;
  ReduceEngine& reductions_;
  std::unordered_map<int64_t, UseCount> uses_left_;  // of parameters whose first use is over
};

/// Parameters are sharded between uses; gradients are reduced as they come.
class Zero3Executor final : public Executor {
 public:
  using Executor::Executor;
  int64_t stage() const override { return 3; }

 private:
  void release_one(int64_t id) override { gathers_.release(id); }
};

/// Parameters stay whole until the optimizer has stepped; gradients are reduced as they come.
class Zero2Executor : public Executor {
 public:
  using Executor::Executor;
  int64_t stage() const override { return 2; }

 private:
  void release_one(int64_t id) override { gathers_.keep(id); }
};

/// Parameters stay whole; gradients are accumulated whole and reduced once.
class Zero1Executor final : public Zero2Executor {
 public:
  using Zero2Executor::Zero2Executor;
  int64_t stage() const override { return 1; }
};

/// The executor of `stage` (1, 2 or 3). `reduce`: "every", "boundary", or empty for the stage's own policy.
std::unique_ptr<Executor> make_executor(int64_t stage, const std::string& reduce, int64_t graph_id, const Ids& ids,
                                        const bool& boundary, Registry& registry, GatherEngine& gathers,
                                        ReduceEngine& reductions);

}  // namespace ldc

// Collectives over a torch ProcessGroup: gloo on CPU, and whatever backend the group has for another device.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "communicators/history.h"

namespace ldc {

/// Starts every operation asynchronously and completes it in `Completion::wait`. Uses the backend's coalesced
/// operations (one message for the group) where it has them, else one operation per tensor.
///
/// Means: gloo has no average, so sums are divided afterwards. A sum over ranks can overflow half precision where the
/// mean does not, so half gradients travel as float.
class ProcessGroupCommunicator final : public Communicator {
 public:
  /// `timeout` 0: the group's own.
  ProcessGroupCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> group, Device device,
                           std::chrono::milliseconds timeout);

  Completion all_gather(const std::vector<Transfer>& group) override;
  Completion reduce_scatter_mean(const std::vector<Transfer>& group) override;
  Completion all_reduce_mean(const std::vector<Transfer>& group) override;
  std::map<std::string, std::vector<Operation>> history() const override { return {{"shards", history_.operations()}}; }

 private:
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
  /// Runs `together` while the backend is believed to support it, and `single` per tensor otherwise.
  template <typename Together, typename Single>
  Works start(bool& coalesced, size_t count, Together together, Single single);
  /// Divides the sums in `outs` by the number of ranks, and copies those to `results` that are apart from it.
  Completion means(int64_t number, std::string what, Works works, std::vector<Tensor> outs, std::vector<Tensor> ins,
                   std::vector<Tensor> results);
  /// Adds operation, parameters and rank to a failure of the backend.
  template <typename Action>
  void explained(std::string_view operation, const std::string& what, Action action) const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;  // owns the backend
  c10::intrusive_ptr<c10d::Backend> backend_;
  c10d::AllgatherOptions gather_options_;
  c10d::ReduceScatterOptions reduce_options_;
  c10d::AllreduceOptions all_reduce_options_;
  History history_;
  bool coalesced_gather_ = true;
  bool coalesced_reduce_ = true;
};

}  // namespace ldc

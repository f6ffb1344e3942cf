// Reductions over two sets of ranks: those that share the parameters, and those that hold the same shards.
#pragma once

#include <memory>
#include <vector>

#include "communicators/communicator.h"

namespace ldc {

/// A communicator of the ranks that share the parameters, whose reductions go on over their replicas: a rank's part is
/// reduced among `shard` first, and the result, `world_size` times smaller, is averaged over `replicas`. The mean of
/// equally many means is the mean over all ranks. Gathers stay among `shard`.
///
/// The second half is issued by `Completion::wait`, behind the first one on the stream that is current then (CPU: when
/// the first one is done). Ranks wait for their reductions in the order in which they issued them, so the second halves
/// are in the same order on all ranks, too.
class HybridCommunicator final : public Communicator {
 public:
  HybridCommunicator(std::shared_ptr<Communicator> shard, std::shared_ptr<Communicator> replicas);

  Completion all_gather(const std::vector<Transfer>& group) override;
  Completion reduce_scatter_mean(const std::vector<Transfer>& group) override;
  Completion all_reduce_mean(const std::vector<Transfer>& group) override;
  bool reduces_in_two_stages() const override { return !shard_->is_alone(); }

  void check_health() override;
  std::map<std::string, std::vector<Operation>> history() const override;
  std::string diagnose(std::chrono::milliseconds limit) override;
  void abort() noexcept override;
  void close() override;
  void retire(std::vector<std::future<void>>& pending) override;

 private:
  Completion and_over_replicas(Completion first, const std::vector<Transfer>& group);

  std::shared_ptr<Communicator> shard_;
  std::shared_ptr<Communicator> replicas_;
};

}  // namespace ldc

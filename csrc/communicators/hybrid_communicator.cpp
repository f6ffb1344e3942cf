#include "communicators/hybrid_communicator.h"

namespace ldc {

HybridCommunicator::HybridCommunicator(std::shared_ptr<Communicator> shard, std::shared_ptr<Communicator> replicas)
    : Communicator(shard->rank(), shard->world_size()), shard_(std::move(shard)), replicas_(std::move(replicas)) {}

Completion HybridCommunicator::all_gather(const std::vector<Transfer>& group) { return shard_->all_gather(group); }

Completion HybridCommunicator::reduce_scatter_mean(const std::vector<Transfer>& group) {
  if (shard_->is_alone()) return replicas_->all_reduce_mean(group);
  return and_over_replicas(shard_->reduce_scatter_mean(group), group);
}

Completion HybridCommunicator::all_reduce_mean(const std::vector<Transfer>& group) {
  if (shard_->is_alone()) return replicas_->all_reduce_mean(group);
  return and_over_replicas(shard_->all_reduce_mean(group), group);
}

Completion HybridCommunicator::and_over_replicas(Completion first, const std::vector<Transfer>& group) {
  std::vector<std::string> owned;  // the names' owners need not outlive this call
  std::vector<Tensor> means;
  for (const Transfer& transfer : group) {
    owned.emplace_back(transfer.name);
    means.push_back(transfer.out);
  }
  return Completion([this, first = std::move(first), owned = std::move(owned), means = std::move(means)]() mutable {
    first.wait();
    std::vector<Transfer> second;
    for (size_t i = 0; i < means.size(); ++i) second.push_back({means[i], means[i], owned[i]});
    replicas_->all_reduce_mean(second).wait();
  });
}

void HybridCommunicator::check_health() {
  shard_->check_health();
  replicas_->check_health();
}

std::string HybridCommunicator::diagnose(std::chrono::milliseconds limit) {
  std::string failure = shard_->diagnose(limit);
  return failure.empty() ? replicas_->diagnose(limit) : failure;
}

std::map<std::string, std::vector<Operation>> HybridCommunicator::history() const {
  std::map<std::string, std::vector<Operation>> both = shard_->history();
  for (auto& [name, operations] : replicas_->history()) both["replicas"] = operations;
  return both;
}

void HybridCommunicator::abort() noexcept { abort_together({shard_.get(), replicas_.get()}); }

void HybridCommunicator::close() {
  shard_->close();
  replicas_->close();
}

void HybridCommunicator::retire(std::vector<std::future<void>>& pending) {
  shard_->retire(pending);
  replicas_->retire(pending);
}

}  // namespace ldc

// Large gathers through memory that the ranks of one host read from each other.
//
// The GPU's copy engines move the data, so no thread blocks are taken from compute that runs beside: that is all there
// is to gain. Each gather costs a copy into the workspace and a barrier, so small ones are better off with NCCL.
//
// The workspace has two halves, each as large as this rank's shards of the largest group so far. Gather k, on the
// stream that is current:
//
//     copy the shards into half k % 2 of my workspace, and to my part of each output
//     barrier
//     copy every other rank's half k % 2 to its part of each output, the next rank's first: no two read from one
//
// One barrier each is enough. Gather k + 2 overwrites the half that others read in gather k. It comes behind barrier
// k + 1 in my stream; a peer that has come to barrier k + 1 has done its copies of gather k, as they come before it in
// the peer's stream. Gather k + 1 in between uses the other half.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "base/stats.h"
#include "communicators/communicator.h"
#include "communicators/in_flight.h"
#include "communicators/peer_memory.h"

namespace ldc {

/// Gathers of at least `threshold` bytes (of the whole group, as gathered) go through `memory`, everything else through
/// `inner`. Devices with streams work in stream order.
///
/// The workspace is made by the first such gather, and again by a larger one: collectively, and the calling thread
/// waits. All ranks gather the same groups, so they agree about when. Where it cannot be made on one rank, all ranks
/// learn so in the same exchange, rank 0 warns with the reason, and everything goes through `inner` from then on.
class SymmetricCommunicator final : public Communicator {
 public:
  /// `in_flight` is the list that `inner` keeps as well.
  SymmetricCommunicator(std::shared_ptr<Communicator> inner, std::shared_ptr<PeerMemory> memory,
                        std::shared_ptr<InFlight> in_flight, Device device, int64_t threshold, Stats& stats);

  std::map<std::string, std::vector<Operation>> history() const override { return inner_->history(); }
  Completion all_gather(const std::vector<Transfer>& group) override;
  Completion reduce_scatter_mean(const std::vector<Transfer>& group) override;
  Completion all_reduce_mean(const std::vector<Transfer>& group) override;

  void check_health() override { inner_->check_health(); }
  std::string diagnose(std::chrono::milliseconds limit) override;
  void abort() noexcept override;
  void close() override;
  void retire(std::vector<std::future<void>>& pending) override;

  /// Of this rank's workspace; 0 before the first gather that uses it.
  int64_t workspace_bytes() const { return 2 * half_bytes_; }

 private:
  bool grow(int64_t bytes);
  void dismantle(std::string& failure);
  /// Runs `mine` and tells everybody how it went. Returns what it returned, by rank; `failure` becomes what the first
  /// rank that failed says, the same text on all ranks, or stays empty.
  std::vector<std::string> everybody(const std::function<std::string()>& mine, std::string& failure);

  std::shared_ptr<Communicator> inner_;
  std::shared_ptr<PeerMemory> memory_;
  std::shared_ptr<InFlight> in_flight_;
  Device device_;
  int64_t threshold_;
  Stats& stats_;
  bool refused_ = false;    // there is no way to the peers
  int64_t half_bytes_ = 0;  // 0: there is no workspace
  int64_t gathers_ = 0;     // since the workspace was made
  Event last_;              // behind the last gather, which may have been on another stream
  std::atomic<bool> aborted_ = false;
  std::vector<Copy> copies_;  // scratch
};

}  // namespace ldc

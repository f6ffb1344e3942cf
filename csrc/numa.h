// On which NUMA node host memory lies: copies to a GPU are faster from the one that the GPU is connected to.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ldc {

struct NumaPlace {
  int64_t node = -1;          // -1: anywhere
  std::vector<int64_t> cpus;  // of the node
};

/// As long as it lives, memory that the kernel finds for the calling thread comes from a node, while that has any.
///
/// By the thread's memory policy. Containers often forbid that; then the thread moves to the node's processors for a
/// while, as the kernel takes memory that is near. A policy that the user gave the process (numactl) stays as it is.
class NumaPreference {
 public:
  explicit NumaPreference(const NumaPlace& place);
  ~NumaPreference();
  NumaPreference(const NumaPreference&) = delete;
  NumaPreference& operator=(const NumaPreference&) = delete;

  /// Why memory may come from anywhere; empty if it does not, and without a node.
  const std::string& refusal() const { return refusal_; }

 private:
  bool set_policy(int64_t node);
  bool move_to(const std::vector<int64_t>& cpus);

  std::vector<unsigned long> policy_nodes_;  // of the policy to go back to
  int policy_ = 0;
  bool has_policy_ = false;
  std::vector<unsigned char> affinity_;  // to go back to; empty: it is unchanged
  std::string refusal_;
};

}  // namespace ldc

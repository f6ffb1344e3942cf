#include "numa.h"

#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>

namespace ldc {
namespace {

constexpr int64_t kNodes = 1024;  // more than any kernel is built for
constexpr int64_t kCpus = 16384;
constexpr int64_t kWord = sizeof(unsigned long) * CHAR_BIT;

long set_mempolicy(int mode, const std::vector<unsigned long>& nodes) {
  return syscall(SYS_set_mempolicy, mode, nodes.data(), kNodes + 1);  // the kernel takes one off
}

}  // namespace

NumaPreference::NumaPreference(const NumaPlace& place) {
  if (place.node < 0 || place.node >= kNodes) return;
  if (set_policy(place.node) || !refusal_.empty()) return;
  const std::string reason = std::strerror(errno);
  if (!move_to(place.cpus)) {
    refusal_ = "set_mempolicy: " + reason + ", and this process may use no processor of node " +
               std::to_string(place.node);
  }
}

NumaPreference::~NumaPreference() {
  if (has_policy_) set_mempolicy(policy_, policy_nodes_);
  if (!affinity_.empty()) sched_setaffinity(0, affinity_.size(), reinterpret_cast<const cpu_set_t*>(affinity_.data()));
}

bool NumaPreference::set_policy(int64_t node) {
  policy_nodes_.assign(kNodes / kWord, 0);
  if (syscall(SYS_get_mempolicy, &policy_, policy_nodes_.data(), kNodes, nullptr, 0) != 0) return false;
  if (policy_ != MPOL_DEFAULT && policy_ != MPOL_LOCAL) {
    refusal_ = "the process has a memory policy of its own";
    return false;
  }
  std::vector<unsigned long> nodes(kNodes / kWord, 0);
  nodes[static_cast<size_t>(node / kWord)] |= 1UL << (node % kWord);
  has_policy_ = set_mempolicy(MPOL_PREFERRED, nodes) == 0;
  return has_policy_;
}

bool NumaPreference::move_to(const std::vector<int64_t>& cpus) {
  std::vector<unsigned char> allowed(CPU_ALLOC_SIZE(kCpus), 0), wanted(allowed.size(), 0);
  const size_t bytes = allowed.size();
  if (sched_getaffinity(0, bytes, reinterpret_cast<cpu_set_t*>(allowed.data())) != 0) return false;
  auto* const target = reinterpret_cast<cpu_set_t*>(wanted.data());
  for (const int64_t cpu : cpus) {
    if (cpu < 0 || cpu >= kCpus) continue;
    const auto number = static_cast<size_t>(cpu);
    if (CPU_ISSET_S(number, bytes, reinterpret_cast<const cpu_set_t*>(allowed.data()))) CPU_SET_S(number, bytes, target);
  }
  if (CPU_COUNT_S(bytes, target) == 0 || sched_setaffinity(0, bytes, target) != 0) return false;
  affinity_ = std::move(allowed);
  return true;
}

}  // namespace ldc

#include "memory/numa.h"

#include <linux/mempolicy.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <exception>
#include <string_view>
#include <thread>

namespace ldc {
namespace {

constexpr int64_t kNodes = 1024;  // more than any kernel is built for
constexpr int64_t kCpus = 16384;
constexpr int64_t kWord = sizeof(unsigned long) * CHAR_BIT;
constexpr std::string_view kOwnPolicy = "the process has a memory policy of its own";

/// The calling thread's policy, for the rest of its life. Returns why it stays what it is.
std::string set_policy(int64_t node) {
  std::vector<unsigned long> nodes(kNodes / kWord, 0);
  int policy = 0;
  if (syscall(SYS_get_mempolicy, &policy, nodes.data(), kNodes, nullptr, 0) != 0) {
    return std::string("get_mempolicy: ") + std::strerror(errno);
  }
  if (policy != MPOL_DEFAULT && policy != MPOL_LOCAL) return std::string(kOwnPolicy);
  nodes.assign(nodes.size(), 0);
  nodes[static_cast<size_t>(node / kWord)] |= 1UL << (node % kWord);
  // The kernel takes one off.
  if (syscall(SYS_set_mempolicy, MPOL_PREFERRED, nodes.data(), kNodes + 1) == 0) return {};
  return std::string("set_mempolicy: ") + std::strerror(errno);
}

/// Moves the calling thread to those of `cpus` that it may use.
bool move_to(const std::vector<int64_t>& cpus) {
  std::vector<unsigned char> allowed(CPU_ALLOC_SIZE(kCpus), 0), wanted(allowed.size(), 0);
  const size_t bytes = allowed.size();
  if (sched_getaffinity(0, bytes, reinterpret_cast<cpu_set_t*>(allowed.data())) != 0) return false;
  auto* const target = reinterpret_cast<cpu_set_t*>(wanted.data());
  for (const int64_t cpu : cpus) {
    if (cpu < 0 || cpu >= kCpus) continue;
    const auto number = static_cast<size_t>(cpu);
    if (CPU_ISSET_S(number, bytes, reinterpret_cast<const cpu_set_t*>(allowed.data()))) CPU_SET_S(number, bytes, target);
  }
  return CPU_COUNT_S(bytes, target) > 0 && sched_setaffinity(0, bytes, target) == 0;
}

/// Makes the calling thread prefer a node. Returns why it does not.
std::string prefer(const NumaPlace& place) {
  const std::string refusal = set_policy(place.node);
  if (refusal.empty() || refusal == kOwnPolicy || move_to(place.cpus)) return refusal == kOwnPolicy ? refusal : "";
  return refusal + ", and this process may use no processor of node " + std::to_string(place.node);
}

}  // namespace

std::string near_node(const NumaPlace& place, const std::function<void()>& action) {
  if (place.node < 0 || place.node >= kNodes) {
    action();
    return {};
  }
  std::string refusal;
  std::exception_ptr failure;
  std::thread([&] {
    try {
      refusal = prefer(place);
      action();
    } catch (...) {
      failure = std::current_exception();
    }
  }).join();
  if (failure) std::rethrow_exception(failure);
  return refusal;
}

}  // namespace ldc

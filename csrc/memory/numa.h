// On which NUMA node host memory lies: copies to a GPU are faster from the one that the GPU is connected to.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace ldc {

struct NumaPlace {
  int64_t node = -1;          // -1: anywhere
  std::vector<int64_t> cpus;  // of the node
};

/// Calls `action`; memory that the kernel finds for it comes from a node, while that has any. What it raises is raised
/// here. Returns why memory may come from anywhere; empty if it does not, and without a node.
///
/// By a memory policy. Containers often forbid that; then by being on the node's processors, as the kernel takes memory
/// that is near. Both belong to a thread, so `action` runs on one of its own, which ends with it: to change the caller's
/// and back again could fail half-way, and its affinity would be another one for ever. A policy that the user gave the
/// process (numactl) stays as it is.
std::string near_node(const NumaPlace& place, const std::function<void()>& action);

}  // namespace ldc

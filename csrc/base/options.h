// Options of a runtime, set at its creation.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace ldc {

/// The Python module has a keyword for each field, with its type and default (bindings.cpp names them).
struct RuntimeOptions {
  std::string communicator = "auto";  // "auto", "nccl" or "process_group"
  int64_t reduce_window = 2;          // groups of gradients that may be pending
  int64_t reduce_bucket_size = 0;     // elements that are collected or copied for one group of reductions; 0: no bound,
                                      // and single gradients travel at once
  int64_t symmetric_threshold = 0;    // bytes of a gathered group from which on it goes through symmetric memory; 0: none
  double timeout = 0;  // seconds that an operation may take; 0: 30 minutes, or what the process groups say
  std::chrono::milliseconds limit() const {  // the same, for what no process group limits
    constexpr double kDefault = 30 * 60;
    return std::chrono::milliseconds(static_cast<int64_t>((timeout > 0 ? timeout : kDefault) * 1000));
  }
  int64_t free_activation_threshold = 0;  // elements; free_tensors leaves smaller tensors alone
  int64_t host_limit = 0;  // most bytes of host memory for all that leaves the device; 0: half of the host's memory
  // For debugging: wait for the device (CPU: for the operation) before or after each group.
  bool sync_before_reduce = false;
  bool sync_after_reduce = false;
  bool sync_before_allgather = false;
  bool sync_after_allgather = false;
  int64_t serial = -1;  // -1: the lowest free number from 1 on
};

}  // namespace ldc

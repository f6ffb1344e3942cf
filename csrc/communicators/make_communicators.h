// Which wires a runtime gets.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <string>

#include "base/options.h"
#include "communicators/communicator.h"

namespace ldc {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

/// The version of NCCL that this build uses, such as "2.28.9"; "" if it is built without, or none is found.
std::string found_nccl();

/// "nccl" or "process_group", for what `RuntimeOptions::communicator` says.
std::string resolve_kind(const std::string& wanted, Device device);

/// Collective over `group`.
std::shared_ptr<Communicator> make_gather_communicator(const std::string& kind, const Group& group, Device device,
                                                       const RuntimeOptions& options);

/// Collective over `group`, and over `replicas` if there are any: gradients are averaged over both. `gather` is the
/// communicator that gathers over the same ranks.
std::shared_ptr<Communicator> make_reduce_communicator(const std::string& kind, const Group& group,
                                                       const Group& replicas, const Communicator& gather, Device device,
                                                       const RuntimeOptions& options);

}  // namespace ldc

// Collectives over NCCL communicators of our own (torch's process groups do not let the caller choose the stream).
// Compiled only with -DLDC_WITH_NCCL; CUDA headers stay in nccl_communicator.cpp.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <string>

#include "base/options.h"
#include "communicators/communicator.h"
#include "communicators/in_flight.h"

namespace ldc {

/// The version of NCCL that is found, such as "2.28.9"; "" if there is none.
std::string nccl_version();

/// Whether what is queued on a CUDA stream becomes part of a graph instead of running.
bool is_captured(const Stream& stream);

/// Collective over `group`: unique ids are broadcast, each by the first of the ranks that meet at it (128 of them, or
/// TORCH_NCCL_RANKS_PER_ROOT); or out of `like`, a communicator of the same ranks that is not in use meanwhile. Of
/// `options` it reads which thread blocks a collective takes: fewer leave more of the GPU to compute that runs beside;
/// and how long all this may take. `copy_engines`: gathers to windows are left to these, where ranks reach each other's
/// memory.
///
/// Operations are queued on the current stream and done in its order. Outside torch's process groups nobody watches
/// them: diagnose() tells a watchdog which operation is stuck, and abort() frees a rank that waits for a dead peer.
std::shared_ptr<Communicator> make_nccl_communicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group, Device device,
                                                     const RuntimeOptions& options, bool copy_engines,
                                                     const Communicator* like);

}  // namespace ldc

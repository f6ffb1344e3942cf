// Collectives over NCCL communicators of our own (torch's process groups do not let the caller choose the stream).
// Compiled only with -DLDC_WITH_NCCL; CUDA headers stay in nccl_communicator.cpp.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>

#include "base/options.h"
#include "communicators/communicator.h"
#include "communicators/in_flight.h"

namespace ldc {

/// Whether what is queued on a CUDA stream becomes part of a graph instead of running.
bool is_captured(const Stream& stream);

/// Collective over `group`: rank 0 makes the unique id and the group broadcasts it. Of `options` it reads which thread
/// blocks a collective takes: fewer leave more of the GPU to compute that runs beside; and how long all this may take.
///
/// Operations are queued on the current stream and done in its order. Outside torch's process groups nobody watches
/// them: diagnose() tells a watchdog which operation is stuck, and abort() frees a rank that waits for a dead peer.
/// `in_flight` is the list of the streams that this communicator's operations are queued on.
std::shared_ptr<Communicator> make_nccl_communicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group, Device device,
                                                     const RuntimeOptions& options, std::shared_ptr<InFlight> in_flight);

}  // namespace ldc

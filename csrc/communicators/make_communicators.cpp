#include "communicators/make_communicators.h"

#include "base/build_info.h"
#include "communicators/hybrid_communicator.h"
#include "communicators/in_flight.h"
#include "communicators/process_group_communicator.h"
#include "communicators/same_on_all_ranks.h"
#include "communicators/solo_communicator.h"
#include "communicators/symmetric_communicator.h"
#ifdef LDC_WITH_NCCL
#include <exception>

#include "communicators/cuda_peer_memory.h"
#include "communicators/nccl_communicator.h"
#include "communicators/watchdog.h"
#endif

namespace ldc {
namespace {

std::shared_ptr<InFlight> make_in_flight([[maybe_unused]] const std::string& kind, Device device) {
#ifdef LDC_WITH_NCCL
  if (kind == "nccl") return std::make_shared<InFlight>(device, &is_captured);
#endif
  return std::make_shared<InFlight>(device);
}

#ifdef LDC_WITH_NCCL
/// Calls `action`, which communicates, with a watchdog for this time; raises what that one saw.
template <typename Action>
void watched(const std::shared_ptr<Communicator>& communicator, std::chrono::milliseconds limit, const Action& action) {
  std::string failure;  // the watchdog's until it has stopped
  Watchdog watchdog({communicator}, limit, [&](const std::string& reason) {
    failure = reason;
    communicator->abort();
  });
  std::exception_ptr error;
  try {
    action();
  } catch (...) {
    error = std::current_exception();
  }
  watchdog.stop();
  LDC_CHECK_WIRE(failure.empty(), failure);  // what came of the action after an abort means nothing
  if (error) std::rethrow_exception(error);
}
#endif

std::shared_ptr<Communicator> make_communicator(const std::string& kind, const Group& group, Device device,
                                                const RuntimeOptions& options,
                                                [[maybe_unused]] std::shared_ptr<InFlight> in_flight) {
#ifdef LDC_WITH_NCCL
  if (kind == "nccl") return make_nccl_communicator(group, device, options, std::move(in_flight));
#endif
  const std::chrono::milliseconds timeout(static_cast<int64_t>(options.timeout * 1000));
  if (group->getSize() == 1) return std::make_shared<SoloCommunicator>();
  return std::make_shared<ProcessGroupCommunicator>(group, device, timeout);
}

}  // namespace

std::string resolve_kind(const std::string& wanted, Device device) {
  LDC_CHECK_ARG(wanted == "auto" || wanted == "nccl" || wanted == "process_group",
                "Runtime: `communicator` must be 'auto', 'nccl' or 'process_group', got '", wanted, "'.");
  if (wanted == "process_group" || (wanted == "auto" && !device.is_cuda())) return "process_group";
  LDC_CHECK_ARG(device.is_cuda(), "Runtime: communicator 'nccl' needs a CUDA device, got ", device, ".");
#ifndef LDC_WITH_NCCL
  LDC_CHECK(false, "this build has no NCCL, which ", device, " needs: ", build_info().at("reason"),
            ". Rebuild with LDC_BUILD=cuda (it names what is missing), for example: LDC_BUILD=cuda pip install "
            "--no-build-isolation --force-reinstall --no-deps . ; or pass communicator='process_group'.");
#endif
  return "nccl";
}

std::shared_ptr<Communicator> make_gather_communicator(const std::string& kind, const Group& group, Device device,
                                                       const RuntimeOptions& options, [[maybe_unused]] Stats& stats) {
  const auto in_flight = make_in_flight(kind, device);
  std::shared_ptr<Communicator> plain = make_communicator(kind, group, device, options, in_flight);
#ifdef LDC_WITH_NCCL
  if (kind == "nccl") {
    watched(plain, options.limit(), [&] {
      require_same_on_all_ranks(*plain, device, "how gathers travel",
                                {c10::str("through symmetric memory from ", options.symmetric_threshold, " bytes on"),
                                 c10::str("packed up to ", options.pack_below, " bytes")});
    });
    if (options.symmetric_threshold == 0 || plain->world_size() == 1) return plain;
    auto memory = make_cuda_peer_memory(plain->rank(), plain->world_size(), device);
    return std::make_shared<SymmetricCommunicator>(std::move(plain), std::move(memory), in_flight, device,
                                                   options.symmetric_threshold, stats);
  }
#endif
  if (options.symmetric_threshold > 0 && plain->rank() == 0) {
    TORCH_WARN("lightning_deepcompile: gathers go through the process group instead of symmetric memory, which needs "
               "CUDA devices and NCCL (the device is ", device, ", the communicator '", kind, "').");
  }
  return plain;
}

std::shared_ptr<Communicator> make_reduce_communicator(const std::string& kind, const Group& group,
                                                       const Group& replicas, Device device,
                                                       const RuntimeOptions& options) {
  std::shared_ptr<Communicator> shard = make_communicator(kind, group, device, options, make_in_flight(kind, device));
  if (!replicas) return shard;
  return std::make_shared<HybridCommunicator>(
      std::move(shard), make_communicator(kind, replicas, device, options, make_in_flight(kind, device)));
}

}  // namespace ldc

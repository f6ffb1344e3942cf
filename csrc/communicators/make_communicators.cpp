#include "communicators/make_communicators.h"

#include "base/build_info.h"
#include "communicators/hybrid_communicator.h"
#include "communicators/process_group_communicator.h"
#include "communicators/same_on_all_ranks.h"
#include "communicators/solo_communicator.h"
#ifdef LDC_WITH_NCCL
#include <exception>

#include "communicators/nccl_communicator.h"
#include "communicators/watchdog.h"
#endif

namespace ldc {
namespace {

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
                                                [[maybe_unused]] bool copy_engines,
                                                [[maybe_unused]] const Communicator* like) {
  if (group->getSize() == 1) return std::make_shared<SoloCommunicator>();
#ifdef LDC_WITH_NCCL
  if (kind == "nccl") return make_nccl_communicator(group, device, options, copy_engines, like);
#endif
  const std::chrono::milliseconds timeout(static_cast<int64_t>(options.timeout * 1000));
  return std::make_shared<ProcessGroupCommunicator>(group, device, timeout);
}

}  // namespace

std::string found_nccl() {
#ifdef LDC_WITH_NCCL
  return nccl_version();
#else
  return {};
#endif
}

std::string resolve_kind(const std::string& wanted, Device device) {
  LDC_CHECK_ARG(wanted == "auto" || wanted == "nccl" || wanted == "process_group",
                "Runtime: `communicator` must be 'auto', 'nccl' or 'process_group', got '", wanted, "'.");
  if (wanted == "process_group" || (wanted == "auto" && !device.is_cuda())) return "process_group";
  LDC_CHECK_ARG(device.is_cuda(), "Runtime: communicator 'nccl' needs a CUDA device, got ", device, ".");
#ifdef LDC_WITH_NCCL
  LDC_CHECK(!found_nccl().empty(), "libnccl.so.2 is not found, which ", device, " needs. It comes with PyTorch for CUDA; "
            "or pip install nvidia-nccl-cu13 (-cu12); or pass communicator='process_group'.");
#else
  LDC_CHECK(false, "this build has no NCCL, which ", device, " needs: ", build_info().at("reason"),
            ". Rebuild with LDC_BUILD=cuda (it names what is missing), for example: LDC_BUILD=cuda pip install "
            "--no-build-isolation --force-reinstall --no-deps . ; or pass communicator='process_group'.");
#endif
  return "nccl";
}

std::shared_ptr<Communicator> make_gather_communicator(const std::string& kind, const Group& group, Device device,
                                                       const RuntimeOptions& options) {
  const bool copy_engines = options.symmetric_threshold > 0 && group->getSize() > 1;
  std::shared_ptr<Communicator> wire = make_communicator(kind, group, device, options, copy_engines, nullptr);
#ifdef LDC_WITH_NCCL
  if (kind == "nccl") {
    watched(wire, options.limit(), [&] {
      require_same_on_all_ranks(*wire, device, "the bound of symmetric memory",
                                {c10::str(options.symmetric_threshold, " bytes")});
    });
    return wire;
  }
#endif
  if (options.symmetric_threshold > 0 && wire->rank() == 0) {
    TORCH_WARN("lightning_deepcompile: gathers go through the process group instead of symmetric memory, which needs "
               "CUDA devices and NCCL (the device is ", device, ", the communicator '", kind, "').");
  }
  return wire;
}

std::shared_ptr<Communicator> make_reduce_communicator(const std::string& kind, const Group& group,
                                                       const Group& replicas, const Communicator& gather, Device device,
                                                       const RuntimeOptions& options) {
  LDC_CHECK_ARG(gather.world_size() == group->getSize() && gather.rank() == group->getRank(),
                "Runtime: `gather_group` (rank ", gather.rank(), " of ", gather.world_size(),
                ") and `reduce_group` (rank ", group->getRank(), " of ", group->getSize(), ") must have the same ranks.");
  std::shared_ptr<Communicator> shard = make_communicator(kind, group, device, options, false, &gather);
  if (!replicas) return shard;
  // They meet by themselves: to be split off, they and the shards would first need a communicator of all ranks.
  auto over = make_communicator(kind, replicas, device, options, false, nullptr);
  return std::make_shared<HybridCommunicator>(std::move(shard), std::move(over));
}

}  // namespace ldc

#include "communicators/nccl_communicator.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/DeviceGuard.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <span>
#include <thread>
#include <utility>

#include "base/cuda_driver.h"

namespace ldc {
namespace {

ncclDataType_t nccl_dtype(ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat: return ncclFloat32;
    case c10::kDouble: return ncclFloat64;
    case c10::kHalf: return ncclFloat16;
    case c10::kBFloat16: return ncclBfloat16;
    default: LDC_CHECK_ARG(false, "NCCL cannot reduce ", dtype, ". Set `reduce_dtype` to a floating dtype.");
  }
}

/// What fails while something is given up: said, as nobody is left to handle it.
void warn_of(const char* call, const char* error) noexcept {
  try {
    TORCH_WARN("lightning_deepcompile: ", call, ": ", error);
  } catch (const std::exception&) {  // there is no memory for a message
  }
}

void warn_of(ncclResult_t result, const char* call) noexcept {
  if (result != ncclSuccess) warn_of(call, ncclGetErrorString(result));
}

/// As long as it lives, CUDA calls of this thread get on with graphs that other threads capture. By default a query of
/// an event fails then, and ends their capture.
class BesideCaptures {
 public:
  BesideCaptures() {
    check_cuda(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode");
  }
  ~BesideCaptures() {
    const cudaError_t result = cudaThreadExchangeStreamCaptureMode(&mode_);
    if (result != cudaSuccess) warn_of("cudaThreadExchangeStreamCaptureMode", cudaGetErrorString(result));
  }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeThreadLocal;
};

/// What NCCL's own messages call the communicator, where this NCCL has names (2.27).
template <typename Config>
void set_name(Config& config, const char* name) {
  if constexpr (requires { config.commName; }) config.commName = name;
}

/// An initialisation under way. It belongs to two threads, and whoever is the last to want it ends it.
struct Creation {
  std::mutex mutex;
  std::condition_variable changed;
  bool finished = false;
  bool given_up = false;
  ncclResult_t result = ncclInternalError;
  ncclComm_t comm = nullptr;
  std::string failure;  // before NCCL was called
};

/// ncclCommInitRankConfig, which waits for all ranks and cannot be told to stop: by a thread of its own, that stays
/// where it is if a rank never comes. Empty: not within `limit`.
std::shared_ptr<Creation> create_within(std::chrono::milliseconds limit, int rank, int world_size,
                                        ncclUniqueId id, ncclConfig_t config, Device device) {
  auto creation = std::make_shared<Creation>();
  std::thread([creation, rank, world_size, id, config, device]() mutable {
    ncclResult_t result = ncclInternalError;
    ncclComm_t comm = nullptr;
    std::string failure;
    try {
      const c10::DeviceGuard guard(device);
      result = ncclCommInitRankConfig(&comm, world_size, id, rank, &config);
    } catch (const std::exception& error) {
      failure = message_of(error);
    }
    const std::lock_guard lock(creation->mutex);
    creation->result = result;
    creation->failure = std::move(failure);
    creation->comm = comm;
    creation->finished = true;
    creation->changed.notify_all();
    if (creation->given_up && comm != nullptr) warn_of(ncclCommAbort(comm), "ncclCommAbort");
  }).detach();
  std::unique_lock lock(creation->mutex);
  if (creation->changed.wait_for(lock, limit, [&] { return creation->finished; })) return creation;
  creation->given_up = true;
  return nullptr;
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group, Device device, const RuntimeOptions& options,
                   std::shared_ptr<InFlight> in_flight)
      : Communicator(group->getRank(), group->getSize()), device_(device), in_flight_(std::move(in_flight)) {
    const ncclUniqueId unique_id = share_unique_id(group);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    set_name(config, "deepcompile");
    if (options.max_ctas > 0) config.maxCTAs = static_cast<int>(options.max_ctas);
    if (options.cta_cluster > 0) config.cgaClusterSize = static_cast<int>(options.cta_cluster);
    const auto created = create_within(options.limit(), static_cast<int>(rank()), static_cast<int>(world_size()),
                                       unique_id, config, device_);
    LDC_CHECK_WIRE(created, "the communicators of ", world_size(), " ranks were not there within ",
                   static_cast<double>(options.limit().count()) / 1000, " s on rank ", rank(),
                   ". Another rank died, hangs, or creates no runtime; or raise `timeout`.");
    LDC_CHECK(created->failure.empty(), "ncclCommInitRankConfig: ", created->failure);
    check(created->result, "ncclCommInitRankConfig", {});
    comm_ = created->comm;
  }

  ~NcclCommunicator() override { abort(); }  // after close() there is nothing left to abort

  Completion all_gather(const std::vector<Transfer>& group) override {
    return submit("gather", group, [this](const Transfer& transfer, cudaStream_t stream) {
      return ncclAllGather(transfer.in.const_data_ptr(), transfer.out.mutable_data_ptr(), transfer.in.nbytes(),
                           ncclInt8, comm_, stream);
    });
  }

  Completion reduce_scatter_mean(const std::vector<Transfer>& group) override {
    return submit("reduction", group, [this](const Transfer& transfer, cudaStream_t stream) {
      const Tensor out = transfer.out.is_complex() ? at::view_as_real(transfer.out) : transfer.out;
      return ncclReduceScatter(transfer.in.const_data_ptr(), out.mutable_data_ptr(),
                               static_cast<size_t>(out.numel()), nccl_dtype(out.scalar_type()), ncclAvg, comm_, stream);
    });
  }

  Completion all_reduce_mean(const std::vector<Transfer>& group) override {
    return submit("reduction over replicas", group, [this](const Transfer& transfer, cudaStream_t stream) {
      const Tensor out = transfer.out.is_complex() ? at::view_as_real(transfer.out) : transfer.out;
      return ncclAllReduce(transfer.in.const_data_ptr(), out.mutable_data_ptr(), static_cast<size_t>(out.numel()),
                           nccl_dtype(out.scalar_type()), ncclAvg, comm_, stream);
    });
  }

  void check_health() override {
    const std::lock_guard lock(calls_);
    ncclResult_t state = ncclSuccess;
    if (ncclComm_t comm = comm_.load()) check(ncclCommGetAsyncError(comm, &state), "ncclCommGetAsyncError", {});
    check(state, "an earlier operation", {});
  }

  std::string diagnose(std::chrono::milliseconds limit) override {
    if (aborted_) return {};
    const BesideCaptures beside;
    if (std::unique_lock lock(calls_, std::try_to_lock); lock.owns_lock()) {  // else a thread is inside: see below
      ncclResult_t state = ncclSuccess;
      if (ncclComm_t comm = comm_.load(); comm != nullptr && ncclCommGetAsyncError(comm, &state) == ncclSuccess &&
                                          state != ncclSuccess && state != ncclInProgress) {
        return c10::str("communication failed on rank ", rank(), " of ", world_size(), ": ", ncclGetErrorString(state),
                        in_flight_text());
      }
    }
    const std::string what = in_flight_->overdue(limit);
    if (what.empty()) return {};
    return c10::str(what, " did not finish within ", static_cast<double>(limit.count()) / 1000, " s on rank ", rank(),
                    " of ", world_size(), ". Another rank died, hangs, or went another way.");
  }

  std::map<std::string, std::vector<Operation>> history() const override { return {{"shards", in_flight_->history()}}; }

  void watch_replay(std::string_view name) override {
    InFlight::Watched watched(*in_flight_, "replay", {Transfer{{}, {}, name}});
    watched.queued();
  }

  void abort() noexcept override {
    using namespace std::chrono_literals;
    aborted_ = true;
    // A thread that has been inside a call for this long is stuck in NCCL, waiting for a peer (connections are made by
    // the first operations). One that is merely passing through leaves within the time.
    std::unique_lock lock(calls_, 500ms);
    ncclComm_t comm = comm_.exchange(nullptr);
    if (comm == nullptr) return;
    if (lock.owns_lock()) return warn_of(ncclCommAbort(comm), "ncclCommAbort");
    // NCCL tells that thread to return, and frees what it returns through: the second must wait for the first. Within
    // a group, as with every call that frees a communicator, it is left to the group's end.
    const ncclResult_t grouped = ncclGroupStart();
    warn_of(grouped, "ncclGroupStart");
    warn_of(ncclCommAbort(comm), "ncclCommAbort");
    // If the thread stays where it is, the communicator does, too; the open group is one of this thread alone.
    if (grouped == ncclSuccess && lock.try_lock_for(10s)) warn_of(ncclGroupEnd(), "ncclGroupEnd");
  }

  void close() override {
    const std::lock_guard lock(calls_);
    if (comm_ == nullptr) return;
    const c10::DeviceGuard guard(device_);
    ncclResult_t finalized = ncclSuccess;
    {
      // All ranks come here, or have died. So it is an operation that a watchdog sees, and the communicator stays where
      // abort() finds it.
      const InFlight::Watched watched(*in_flight_, "the end of a communicator", {});
      finalized = ncclCommFinalize(comm_);
    }
    ncclComm_t comm = comm_.exchange(nullptr);
    LDC_CHECK_WIRE(comm != nullptr, "the communicator of rank ", rank(), " of ", world_size(),
                   " was aborted while it was ended. Another rank died, hangs, or did not end it.");
    const ncclResult_t destroyed = ncclCommDestroy(comm);  // of this rank alone
    check(finalized, "ncclCommFinalize", {});
    check(destroyed, "ncclCommDestroy", {});
  }

  void retire(std::vector<std::future<void>>& pending) override {
    const std::lock_guard lock(calls_);
    ncclComm_t comm = comm_.exchange(nullptr);
    if (comm == nullptr) return;
    // NCCL destroys a communicator when all ranks do. Where a rank does it at a time of its own (its garbage collector
    // ran), the thread that happens to be there must not wait for peers, who may be waiting for it.
    std::packaged_task<void()> task([comm, device = device_, rank = rank()] {
      const auto [finalized, destroyed] = end(comm, device);
      const ncclResult_t result = finalized == ncclSuccess ? destroyed : finalized;
      if (result != ncclSuccess) TORCH_WARN("rank ", rank, " could not end a communicator: ", ncclGetErrorString(result));
    });
    pending.push_back(task.get_future());
    std::thread(std::move(task)).detach();
  }

 private:
  /// What ncclCommFinalize and ncclCommDestroy say; waits until all ranks have come here.
  static std::pair<ncclResult_t, ncclResult_t> end(ncclComm_t comm, Device device) {
    const c10::DeviceGuard guard(device);
    const ncclResult_t finalized = ncclCommFinalize(comm);
    return {finalized, ncclCommDestroy(comm)};
  }

  /// Ends the NCCL group whatever happens in between: an open group would swallow every later call of this thread.
  class Bracket {
   public:
    Bracket() : open_(ncclGroupStart() == ncclSuccess) {}
    ~Bracket() {
      if (open_) warn_of(ncclGroupEnd(), "ncclGroupEnd");
    }
    Bracket(const Bracket&) = delete;
    Bracket& operator=(const Bracket&) = delete;
    bool open() const { return open_; }
    ncclResult_t end() {
      open_ = false;
      return ncclGroupEnd();
    }

   private:
    bool open_;
  };

  std::string in_flight_text() {
    const std::string first = in_flight_->first();
    return first.empty() ? "." : c10::str(", during ", first, ".");
  }

  template <typename Call>
  Completion submit(std::string_view operation, const std::vector<Transfer>& group, Call call) {
    const std::lock_guard lock(calls_);
    LDC_CHECK_WIRE(!aborted_ && comm_ != nullptr, operation, " of ", names(group), ": the communicator of rank ",
                   rank(), " was ", aborted_ ? "aborted." : "closed.");
    const auto stream = static_cast<cudaStream_t>(current_stream(device_).native_handle());
    InFlight::Watched watched(*in_flight_, operation, group);
    Bracket bracket;
    LDC_CHECK_WIRE(bracket.open(), "ncclGroupStart failed on rank ", rank(), ".");
    for (const Transfer& transfer : group) {
      if (transfer.in.numel() > 0) check(call(transfer, stream), operation, {&transfer, 1});
    }
    check(bracket.end(), operation, {group.data(), group.size()});
    watched.queued();
    return {};  // in stream order
  }

  void check(ncclResult_t result, std::string_view operation, std::span<const Transfer> group) const {
    if (result == ncclSuccess) return;
    const char* detail = ncclGetLastError(comm_);
    LDC_CHECK_WIRE(false, operation, group.empty() ? "" : " of " + names({group.begin(), group.end()}),
                   " failed on rank ", rank(), " of ", world_size(), ": ", ncclGetErrorString(result), " (",
                   detail != nullptr && *detail != '\0' ? detail : "no detail; set NCCL_DEBUG=WARN", ").");
  }

  ncclUniqueId share_unique_id(const c10::intrusive_ptr<c10d::ProcessGroup>& group) const {
    ncclUniqueId id{};
    if (rank() == 0) check(ncclGetUniqueId(&id), "ncclGetUniqueId", {});
    // Through host memory where the group can do that (gloo), else through the device.
    const auto devices = group->getDeviceTypes();
    const bool host = std::any_of(devices.begin(), devices.end(), [](Device d) { return d.is_cpu(); });
    Tensor message = at::empty({static_cast<int64_t>(sizeof(id))}, at::TensorOptions().dtype(c10::kByte));
    std::memcpy(message.mutable_data_ptr(), &id, sizeof(id));
    std::vector<Tensor> messages = {host ? message : message.to(device_)};
    group->getBackend(host ? c10::DeviceType::CPU : device_.type())->broadcast(messages)->wait();
    message = messages[0].cpu();
    std::memcpy(&id, message.const_data_ptr(), sizeof(id));
    return id;
  }

  Device device_;
  std::atomic<ncclComm_t> comm_ = nullptr;  // abort() may take it while another thread is inside NCCL
  std::atomic<bool> aborted_ = false;
  std::shared_ptr<InFlight> in_flight_;  // emptied by diagnose()
  std::timed_mutex calls_;  // held while a thread is inside NCCL with this communicator
};

}  // namespace

bool is_captured(const Stream& stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream.native_handle()), &status),
             "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

std::shared_ptr<Communicator> make_nccl_communicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group, Device device,
                                                     const RuntimeOptions& options, std::shared_ptr<InFlight> in_flight) {
  return std::make_shared<NcclCommunicator>(group, device, options, std::move(in_flight));
}

}  // namespace ldc

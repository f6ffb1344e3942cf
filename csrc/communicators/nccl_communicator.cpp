#include "communicators/nccl_communicator.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/DeviceGuard.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <thread>
#include <utility>

#include "base/cuda_driver.h"
#include "communicators/nccl_functions.h"
#include "communicators/same_on_all_ranks.h"

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

/// A number that is the same on the ranks of one host, as NCCL sees hosts, and on no others.
int64_t host_number() {
  std::string host(256, '\0');
  if (const char* id = std::getenv("NCCL_HOSTID"); id != nullptr) {
    host = id;
  } else {
    LDC_CHECK(gethostname(host.data(), host.size()) == 0, "gethostname: ", std::strerror(errno));
  }
  return digest(host.c_str());
}

/// How many ranks meet at one id, as for torch's own groups.
int64_t ranks_per_id() {
  constexpr const char* kName = "TORCH_NCCL_RANKS_PER_ROOT";
  const char* text = std::getenv(kName);
  if (text == nullptr) return 128;
  char* end = nullptr;
  const int64_t number = std::strtoll(text, &end, 10);
  LDC_CHECK_ARG(number > 0 && *end == '\0', kName, "=", text, " is no number of ranks: give 1 or more, or unset it.");
  return number;
}

/// A communicator of NCCL's, shared with the threads that are inside NCCL with it: it is not freed before they leave.
struct Handle {
  std::atomic<ncclComm_t> comm = nullptr;  // abort() may take it while another thread is inside NCCL
  std::timed_mutex calls;                  // held while a thread is inside NCCL with this communicator
};

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

/// `create` waits for all ranks and cannot be told to stop: by a thread of its own, that stays where it is if a rank
/// never comes. Empty: not within `limit`.
std::shared_ptr<Creation> create_within(std::chrono::milliseconds limit, Device device,
                                        std::function<ncclResult_t(ncclComm_t*)> create) {
  auto creation = std::make_shared<Creation>();
  std::thread([creation, device, create = std::move(create)] {
    ncclResult_t result = ncclInternalError;
    ncclComm_t comm = nullptr;
    std::string failure;
    try {
      const c10::DeviceGuard guard(device);
      result = create(&comm);
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
                   bool copy_engines, const NcclCommunicator* like)
      : Communicator(group->getRank(), group->getSize()),
        device_(device),
        in_flight_(std::make_shared<InFlight>(device, &is_captured)) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    set_name(config, "deepcompile");
    if (copy_engines) use_copy_engines(config);
    const int own_rank = static_cast<int>(rank()), ranks = static_cast<int>(world_size());
    std::function<ncclResult_t(ncclComm_t*)> create;
    if (like != nullptr) {
      // The ranks know each other by then: no unique id, and no rank to which all the others connect.
      create = [parent = like->handle_, own_rank, config](ncclComm_t* comm) mutable {
        const std::lock_guard lock(parent->calls);
        ncclComm_t whole = parent->comm.load();
        LDC_CHECK_WIRE(whole != nullptr, "the communicator that it begins with was aborted.");
        return ncclCommSplit(whole, 0, own_rank, comm, &config);
      };
    } else {
      create = [ids = share_unique_ids(group), own_rank, ranks, config](ncclComm_t* comm) mutable {
#if LDC_WITH_SEVERAL_IDS
        return ncclCommInitRankScalable(comm, ranks, own_rank, static_cast<int>(ids.size()), ids.data(), &config);
#else
        return ncclCommInitRankConfig(comm, ranks, ids[0], own_rank, &config);
#endif
      };
    }
    const char* call = like != nullptr ? "ncclCommSplit" : "ncclCommInitRank";
    const auto created = create_within(options.limit(), device_, std::move(create));
    LDC_CHECK_WIRE(created, "the communicators of ", world_size(), " ranks were not there within ",
                   static_cast<double>(options.limit().count()) / 1000, " s on rank ", rank(), " (", call,
                   "). Another rank died, hangs, or creates no runtime; or raise `timeout`.");
    LDC_CHECK(created->failure.empty(), call, ": ", created->failure);
    check(created->result, call, {});
    handle_->comm = created->comm;
  }

  ~NcclCommunicator() override { abort(); }  // after close() there is nothing left to abort

  Completion all_gather(const std::vector<Transfer>& group) override {
    return submit("gather", group, [this](const Transfer& transfer, cudaStream_t stream) {
      return ncclAllGather(transfer.in.const_data_ptr(), transfer.out.mutable_data_ptr(), transfer.in.nbytes(),
                           ncclInt8, handle_->comm, stream);
    });
  }

  Completion reduce_scatter_mean(const std::vector<Transfer>& group) override {
    return submit("reduction", group, [this](const Transfer& transfer, cudaStream_t stream) {
      const Tensor out = transfer.out.is_complex() ? at::view_as_real(transfer.out) : transfer.out;
      return ncclReduceScatter(transfer.in.const_data_ptr(), out.mutable_data_ptr(),
                               static_cast<size_t>(out.numel()), nccl_dtype(out.scalar_type()), ncclAvg, handle_->comm,
                               stream);
    });
  }

  Completion all_reduce_mean(const std::vector<Transfer>& group) override {
    return submit("reduction over replicas", group, [this](const Transfer& transfer, cudaStream_t stream) {
      const Tensor out = transfer.out.is_complex() ? at::view_as_real(transfer.out) : transfer.out;
      return ncclAllReduce(transfer.in.const_data_ptr(), out.mutable_data_ptr(), static_cast<size_t>(out.numel()),
                           nccl_dtype(out.scalar_type()), ncclAvg, handle_->comm, stream);
    });
  }

  bool has_windows() const override { return copy_engines_; }

  Tensor make_window([[maybe_unused]] int64_t bytes) override {
#if LDC_WITH_WINDOWS
    const PlainTensors plain;
    const c10::DeviceGuard guard(device_);
    std::shared_ptr<void> memory = allocate(bytes);
    Tensor mine = at::empty({3}, at::TensorOptions().dtype(c10::kLong));
    auto* said = mine.mutable_data_ptr<int64_t>();
    said[0] = bytes, said[1] = memory != nullptr, said[2] = host_number();
    const Tensor answers = collect(*this, device_, mine, "memory for gathers");
    for (int64_t other = 0; other < world_size(); ++other) {
      const auto* answer = answers.const_data_ptr<int64_t>() + 3 * other;
      LDC_CHECK_WIRE(answer[0] == bytes, "rank ", rank(), " gathers to ", bytes, " bytes of symmetric memory, and rank ",
                     other, " to ", answer[0], ". Ranks must gather alike; or set symmetric_memory=False.");
      const bool here = answer[2] == said[2];
      if (here && answer[1] != 0) continue;
      if (rank() == 0) {
        TORCH_WARN("lightning_deepcompile: gathers take NCCL's kernels instead of symmetric memory: rank ", other,
                   here ? c10::str(" has no ", bytes >> 20, " MiB for it.") : " is on another host.");
      }
      return {};
    }
    const std::lock_guard lock(handle_->calls);
    LDC_CHECK_WIRE(!aborted_ && handle_->comm != nullptr, "the communicator of rank ", rank(), " was aborted.");
    ncclWindow_t window = nullptr;
    {
      const InFlight::Watched watched(*in_flight_, "registration of memory", {});  // waits for all ranks
      check(ncclCommWindowRegister(handle_->comm, memory.get(), static_cast<size_t>(bytes), &window,
                                   NCCL_WIN_COLL_SYMMETRIC),
            "ncclCommWindowRegister", {});
    }
    windows_.emplace(memory.get(), window);
    const auto options = at::TensorOptions().dtype(c10::kByte).device(device_);
    return at::from_blob(memory.get(), {bytes}, [memory](void*) {}, options);
#else
    return {};
#endif
  }

  void drop_window([[maybe_unused]] const Tensor& window) override {
#if LDC_WITH_WINDOWS
    const std::lock_guard lock(handle_->calls);
    const auto found = windows_.find(window.const_data_ptr());
    if (found == windows_.end() || handle_->comm == nullptr || aborted_) return;
    check(ncclCommWindowDeregister(handle_->comm, found->second), "ncclCommWindowDeregister", {});
    windows_.erase(found);
#endif
  }

  void check_health() override {
    const std::lock_guard lock(handle_->calls);
    ncclResult_t state = ncclSuccess;
    if (ncclComm_t comm = handle_->comm.load()) check(ncclCommGetAsyncError(comm, &state), "ncclCommGetAsyncError", {});
    check(state, "an earlier operation", {});
  }

  std::string diagnose(std::chrono::milliseconds limit) override {
    if (aborted_) return {};
    const BesideCaptures beside;
    if (std::unique_lock lock(handle_->calls, std::try_to_lock); lock.owns_lock()) {  // else a thread is inside: see below
      ncclResult_t state = ncclSuccess;
      if (ncclComm_t comm = handle_->comm.load(); comm != nullptr && ncclCommGetAsyncError(comm, &state) == ncclSuccess &&
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
    if (copy_engines_) end_if_stuck();
    // A thread that has been inside a call for this long is stuck in NCCL, waiting for a peer (connections are made by
    // the first operations). One that is merely passing through leaves within the time.
    std::unique_lock lock(handle_->calls, 500ms);
    ncclComm_t comm = handle_->comm.exchange(nullptr);
    if (comm == nullptr) return;
    if (lock.owns_lock()) return warn_of(ncclCommAbort(comm), "ncclCommAbort");
    // NCCL tells that thread to return, and frees what it returns through: the second must wait for the first. Within
    // a group, as with every call that frees a communicator, it is left to the group's end.
    const auto abort_behind = [comm, &handle = *handle_] {
      const ncclResult_t grouped = ncclGroupStart();
      warn_of(grouped, "ncclGroupStart");
      if (grouped != ncclSuccess) return;
      warn_of(ncclCommAbort(comm), "ncclCommAbort");
      const std::unique_lock left(handle.calls, 10s);
      if (left.owns_lock()) return warn_of(ncclGroupEnd(), "ncclGroupEnd");
      warn_of("ncclCommAbort", "a thread stays inside NCCL, so its communicator is not freed");
    };
    try {
      // By a thread of its own: if the other one stays where it is, the group stays open, and would swallow every later
      // call of this one.
      std::jthread(abort_behind).join();
    } catch (const std::exception& error) {
      warn_of("std::thread", error.what());
    }
  }

  void close() override {
    const std::lock_guard lock(handle_->calls);
    if (handle_->comm == nullptr) return;
    const c10::DeviceGuard guard(device_);
    deregister();
    ncclResult_t finalized = ncclSuccess;
    {
      // All ranks come here, or have died. So it is an operation that a watchdog sees, and the communicator stays where
      // abort() finds it.
      const InFlight::Watched watched(*in_flight_, "the end of a communicator", {});
      finalized = ncclCommFinalize(handle_->comm);
    }
    ncclComm_t comm = handle_->comm.exchange(nullptr);
    LDC_CHECK_WIRE(comm != nullptr, "the communicator of rank ", rank(), " of ", world_size(),
                   " was aborted while it was ended. Another rank died, hangs, or did not end it.");
    const ncclResult_t destroyed = ncclCommDestroy(comm);  // of this rank alone
    check(finalized, "ncclCommFinalize", {});
    check(destroyed, "ncclCommDestroy", {});
  }

  void retire(std::vector<std::future<void>>& pending) override {
    const std::lock_guard lock(handle_->calls);
    deregister();
    ncclComm_t comm = handle_->comm.exchange(nullptr);
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

  void use_copy_engines([[maybe_unused]] ncclConfig_t& config) {
#if LDC_WITH_WINDOWS
    int version = 0;
    check(ncclGetVersion(&version), "ncclGetVersion", {});
    copy_engines_ = version >= NCCL_VERSION(2, 28, 0);
    if (copy_engines_) config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
#endif
    if (!copy_engines_ && rank() == 0) {
      TORCH_WARN("lightning_deepcompile: gathers take NCCL's kernels instead of symmetric memory, which needs NCCL 2.28.");
    }
  }

  /// Null: there is no memory. Freed by whoever holds it last.
  static std::shared_ptr<void> allocate(int64_t bytes) {
    void* address = nullptr;
    if (ncclMemAlloc(&address, static_cast<size_t>(bytes)) != ncclSuccess) {
      at::accelerator::emptyCache();  // torch keeps what it does not use
      cudaGetLastError();
      if (ncclMemAlloc(&address, static_cast<size_t>(bytes)) != ncclSuccess) {
        cudaGetLastError();  // else torch would find it after its next kernel
        return nullptr;
      }
    }
    return {address, [](void* memory) { warn_of(ncclMemFree(memory), "ncclMemFree"); }};
  }

  /// With the lock; the device is idle.
  void deregister() noexcept {
#if LDC_WITH_WINDOWS
    ncclComm_t comm = handle_->comm.load();
    if (comm == nullptr || aborted_) return;
    for (const auto& [memory, window] : windows_) {
      warn_of(ncclCommWindowDeregister(comm, window), "ncclCommWindowDeregister");
    }
    windows_.clear();
#endif
  }

  /// An abort reaches kernels, but no copy engine that waits for a peer, nor whoever waits for the device. So the process
  /// ends if the device does not get on, as one does that torch's process groups give up.
  void end_if_stuck() noexcept {
    using namespace std::chrono_literals;
    try {
      std::thread([in_flight = in_flight_, rank = rank()] {
        const auto end = std::chrono::steady_clock::now() + 5s;
        while (std::chrono::steady_clock::now() < end) {
          if (in_flight->idle()) return;
          std::this_thread::sleep_for(50ms);
        }
        std::fprintf(stderr, "lightning_deepcompile: rank %d ends: %s did not finish and cannot be aborted, as a copy "
                     "engine waits in it for a rank that died or hangs.\n", static_cast<int>(rank),
                     in_flight->first().c_str());
        std::fflush(stderr);
        std::_Exit(EXIT_FAILURE);
      }).detach();
    } catch (const std::exception& error) {
      warn_of("std::thread", error.what());
    }
  }

  std::string in_flight_text() {
    const std::string first = in_flight_->first();
    return first.empty() ? "." : c10::str(", during ", first, ".");
  }

  template <typename Call>
  Completion submit(std::string_view operation, const std::vector<Transfer>& group, Call call) {
    const std::lock_guard lock(handle_->calls);
    LDC_CHECK_WIRE(!aborted_ && handle_->comm != nullptr, operation, " of ", names(group), ": the communicator of rank ",
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
    const char* detail = ncclGetLastError(handle_->comm);
    LDC_CHECK_WIRE(false, operation, group.empty() ? "" : " of " + names({group.begin(), group.end()}),
                   " failed on rank ", rank(), " of ", world_size(), ": ", ncclGetErrorString(result), " (",
                   detail != nullptr && *detail != '\0' ? detail : "no detail; set NCCL_DEBUG=WARN", ").");
  }

  /// Ids at which the ranks meet: each is made by the first of the ranks that NCCL sends there.
  std::vector<ncclUniqueId> share_unique_ids(const c10::intrusive_ptr<c10d::ProcessGroup>& group) const {
    const int64_t number = LDC_WITH_SEVERAL_IDS ? (world_size() + ranks_per_id() - 1) / ranks_per_id() : 1;
    std::vector<ncclUniqueId> ids;
    for (int64_t index = 0; index < number; ++index) {
      const int64_t root = index * (world_size() / number) + std::min(index, world_size() % number);
      ids.push_back(share_unique_id(group, root));
    }
    return ids;
  }

  ncclUniqueId share_unique_id(const c10::intrusive_ptr<c10d::ProcessGroup>& group, int64_t root) const {
    ncclUniqueId id{};
    if (rank() == root) check(ncclGetUniqueId(&id), "ncclGetUniqueId", {});
    // Through host memory where the group can do that (gloo), else through the device.
    const auto devices = group->getDeviceTypes();
    const bool host = std::any_of(devices.begin(), devices.end(), [](Device d) { return d.is_cpu(); });
    Tensor message = at::empty({static_cast<int64_t>(sizeof(id))}, at::TensorOptions().dtype(c10::kByte));
    std::memcpy(message.mutable_data_ptr(), &id, sizeof(id));
    std::vector<Tensor> messages = {host ? message : message.to(device_)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    group->getBackend(host ? c10::DeviceType::CPU : device_.type())->broadcast(messages, options)->wait();
    message = messages[0].cpu();
    std::memcpy(&id, message.const_data_ptr(), sizeof(id));
    return id;
  }

  Device device_;
  const std::shared_ptr<Handle> handle_ = std::make_shared<Handle>();
  std::atomic<bool> aborted_ = false;
  std::shared_ptr<InFlight> in_flight_;  // emptied by diagnose()
  bool copy_engines_ = false;
#if LDC_WITH_WINDOWS
  std::map<const void*, ncclWindow_t> windows_;  // by their memory
#endif
};

}  // namespace

bool is_captured(const Stream& stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream.native_handle()), &status),
             "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

std::string nccl_version() {
  int version = 0;
  if (!ncclGetVersion.exists() || ncclGetVersion(&version) != ncclSuccess) return {};
  return c10::str(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

std::shared_ptr<Communicator> make_nccl_communicator(const c10::intrusive_ptr<c10d::ProcessGroup>& group, Device device,
                                                     const RuntimeOptions& options, bool copy_engines,
                                                     const Communicator* like) {
  return std::make_shared<NcclCommunicator>(group, device, options, copy_engines,
                                            dynamic_cast<const NcclCommunicator*>(like));
}

}  // namespace ldc

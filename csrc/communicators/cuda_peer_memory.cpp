#include "communicators/cuda_peer_memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <utility>

#include "base/cuda_driver.h"
#include "communicators/signal_pad.h"

namespace ldc {
namespace {

using std::chrono::milliseconds;
using StreamBatchMemOp = CUresult (*)(CUstream, unsigned int, CUstreamBatchMemOpParams*, unsigned int);

constexpr milliseconds kTrial(5'000);
constexpr int64_t kLargestWorld = 64;  // the driver takes 256 memory operations at once
using Token = uint64_t;

/// What one rank tells the others. Bytes on the wire, the same program on all ranks.
struct Offer {
  cudaIpcMemHandle_t memory;
  Token token;        // at the start of the memory
  char pad_name[64];  // rank 0's
};
static_assert(std::is_trivially_copyable_v<Offer> && sizeof(Offer) <= PeerMemory::kLongestOffer);

class CudaPeerMemory final : public PeerMemory {
 public:
  CudaPeerMemory(int64_t rank, int64_t world_size, Device device)
      : rank_(rank), world_size_(world_size), device_(device), pad_(rank, world_size), bases_(world_size, nullptr) {}

  // Nothing is freed here: without everybody's leave, somebody may still read it.

  std::string offer(int64_t bytes) override {
    const c10::DeviceGuard guard(device_);
    LDC_CHECK(world_size_ <= kLargestWorld, "symmetric memory is for at most ", kLargestWorld, " ranks");
    load_driver();
    bytes_ = bytes;
    // Behind the workspace: what the trial reads of each rank.
    own_ = allocate(bytes + align_up(world_size_ * static_cast<int64_t>(sizeof(Token)), kAlignment));
    bases_[static_cast<size_t>(rank_)] = own_;
    Offer mine{};
    check_cuda(cudaIpcGetMemHandle(&mine.memory, own_), "cudaIpcGetMemHandle");
    std::random_device random;
    mine.token = (static_cast<Token>(random()) << 32) | random();
    check_cuda(cudaMemcpyAsync(own_, &mine.token, sizeof(Token), cudaMemcpyHostToDevice, stream()), "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
    if (rank_ == 0) {
      const std::lock_guard lock(pad_mutex_);
      pad_.create();
      LDC_CHECK(pad_.name().size() < sizeof(mine.pad_name), "the name ", pad_.name(), " is too long");
      std::memcpy(mine.pad_name, pad_.name().data(), pad_.name().size());
    }
    return {reinterpret_cast<const char*>(&mine), sizeof(mine)};
  }

  void connect(const std::vector<std::string>& offers) override {
    const c10::DeviceGuard guard(device_);
    std::vector<Offer> all(offers.size());
    for (size_t i = 0; i < offers.size(); ++i) {
      LDC_CHECK(offers[i].size() == sizeof(Offer), "rank ", i, " runs another version of lightning_deepcompile");
      std::memcpy(&all[i], offers[i].data(), sizeof(Offer));
    }
    if (rank_ != 0) {
      const std::lock_guard lock(pad_mutex_);
      pad_.open({all[0].pad_name, strnlen(all[0].pad_name, sizeof(all[0].pad_name))});
    }
    check_cuda(cudaHostRegister(pad_.data(), pad_.bytes(), cudaHostRegisterMapped), "cudaHostRegister");
    registered_ = true;
    void* words = nullptr;
    check_cuda(cudaHostGetDevicePointer(&words, pad_.data(), 0), "cudaHostGetDevicePointer");
    words_ = reinterpret_cast<CUdeviceptr>(words);
    for (int64_t step = 1; step < world_size_; ++step) {
      const auto peer = static_cast<size_t>((rank_ + step) % world_size_);
      void* base = nullptr;
      check_cuda(cudaIpcOpenMemHandle(&base, all[peer].memory, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
      bases_[peer] = static_cast<std::byte*>(base);
    }
    try_copies(all);
    try_waits();
  }

  void connected() override { pad_.unlink(); }

  std::byte* of(int64_t rank) const override { return bases_[static_cast<size_t>(rank)]; }

  void copy(const std::vector<Copy>& copies, bool local) override {
    const c10::DeviceGuard guard(device_);
    const cudaStream_t on = stream();
    // Batches go to copy engines, which are slow within one device. The default stream takes none.
    if (batches_ && !local && copies.size() > 1 && on != nullptr) {
      check_cuda(batch(copies, on), "cudaMemcpyBatchAsync");
      return;
    }
    for (const Copy& one : copies) {
      check_cuda(cudaMemcpyAsync(one.to, one.from, static_cast<size_t>(one.bytes), cudaMemcpyDefault, on),
            "cudaMemcpyAsync");
    }
  }

  void barrier() override {
    const c10::DeviceGuard guard(device_);
    const uint32_t number = ++number_;
    stay_close_to_device(number);
    operations_.clear();
    for (int64_t step = 1; step <= world_size_; ++step) {  // this rank's own word last: behind() compares with it
      add_write(pad_.index(number, (rank_ + step) % world_size_, rank_), number);
    }
    for (int64_t step = 1; step < world_size_; ++step) {
      add_wait(pad_.index(number, rank_, (rank_ + step) % world_size_), number);
    }
    submit();
  }

  std::vector<int64_t> behind() const override {
    const std::lock_guard lock(pad_mutex_);
    return pad_.mapped() ? pad_.behind() : std::vector<int64_t>();
  }

  void release() noexcept override {
    const std::lock_guard lock(pad_mutex_);
    released_ = true;
    if (pad_.mapped()) pad_.release(number_);
  }

  void leave() override {
    const c10::DeviceGuard guard(device_);
    for (int64_t peer = 0; peer < world_size_; ++peer) {
      std::byte*& base = bases_[static_cast<size_t>(peer)];
      if (peer == rank_ || base == nullptr) continue;
      check_cuda(cudaIpcCloseMemHandle(std::exchange(base, nullptr)), "cudaIpcCloseMemHandle");
    }
    if (pad_.mapped()) pad_.leave();
  }

  bool all_left() const override { return pad_.mapped() && pad_.all_left(); }

  void free() override {
    const c10::DeviceGuard guard(device_);
    if (std::exchange(registered_, false)) check_cuda(cudaHostUnregister(pad_.data()), "cudaHostUnregister");
    {
      const std::lock_guard lock(pad_mutex_);
      pad_.unmap();
      number_ = 0;
    }
    bases_.assign(bases_.size(), nullptr);
    check_cuda(cudaFree(std::exchange(own_, nullptr)), "cudaFree");
  }

 private:
  cudaStream_t stream() const { return static_cast<cudaStream_t>(current_stream(device_).native_handle()); }

  void load_driver() {
    if (memory_operations_ != nullptr) return;
    memory_operations_ = driver_function<StreamBatchMemOp>("cuStreamBatchMemOp", 12000);
  }

  /// Outside torch's allocator, whose memory may lie anywhere in a larger allocation.
  std::byte* allocate(int64_t bytes) const {
    void* memory = nullptr;
    if (cudaMalloc(&memory, static_cast<size_t>(bytes)) != cudaSuccess) {
      cudaGetLastError();
      c10::getDeviceAllocator(device_.type())->emptyCache();
      check_cuda(cudaMalloc(&memory, static_cast<size_t>(bytes)), "cudaMalloc");
    }
    return static_cast<std::byte*>(memory);
  }

  cudaError_t batch(const std::vector<Copy>& copies, cudaStream_t on) {
#if CUDART_VERSION >= 12080
    to_.clear();
    from_.clear();
    sizes_.clear();
    for (const Copy& one : copies) {
      to_.push_back(one.to);
      from_.push_back(one.from);
      sizes_.push_back(static_cast<size_t>(one.bytes));
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    size_t first = 0;
#if CUDART_VERSION >= 13000
    return cudaMemcpyBatchAsync(to_.data(), from_.data(), sizes_.data(), to_.size(), &attributes, &first, 1, on);
#else
    size_t failed = 0;
    return cudaMemcpyBatchAsync(to_.data(), const_cast<void**>(from_.data()), sizes_.data(), to_.size(), &attributes,
                                &first, 1, &failed, on);
#endif
#else
    return cudaErrorNotSupported;
#endif
  }

  /// Reads every rank's token through its handle: do the copies work, and is it that rank's memory?
  void try_copies(const std::vector<Offer>& offers) {
    std::vector<Copy> copies;
    auto* scratch = own_ + bytes_;
    for (int64_t peer = 0; peer < world_size_; ++peer) {
      copies.push_back({scratch + peer * static_cast<int64_t>(sizeof(Token)), of(peer), sizeof(Token)});
    }
    if (stream() != nullptr && batch(copies, stream()) == cudaSuccess) {
      batches_ = true;
    } else {
      cudaGetLastError();  // an older driver, or an older CUDA
      copy(copies, /*local=*/false);
    }
    std::vector<Token> seen(offers.size());
    check_cuda(cudaMemcpyAsync(seen.data(), scratch, seen.size() * sizeof(Token), cudaMemcpyDeviceToHost, stream()),
          "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(stream()), "reading the other ranks' memory");
    for (size_t peer = 0; peer < seen.size(); ++peer) {
      LDC_CHECK(seen[peer] == offers[peer].token, "what is read of rank ", peer, "'s memory is not what it wrote");
    }
  }

  /// One write and one wait on a word of this rank's own: does the device carry them out?
  void try_waits() {
    operations_.clear();
    add_write(pad_.spare(), 1);
    add_wait(pad_.spare(), 1);
    submit();
    const auto end = std::chrono::steady_clock::now() + kTrial;
    cudaError_t state = cudaErrorNotReady;
    while ((state = cudaStreamQuery(stream())) == cudaErrorNotReady && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    const bool written = pad_.load(pad_.spare()) == 1;
    pad_.store(pad_.spare(), 1);  // or the stream would wait for ever
    cudaGetLastError();  // "not ready" is no error
    LDC_CHECK(state == cudaSuccess && written, "stream memory operations: ", cudaGetErrorString(state));
  }

  void add_write(size_t index, uint32_t value) {
    CUstreamBatchMemOpParams& operation = operations_.emplace_back();
    std::memset(&operation, 0, sizeof(operation));
    operation.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    operation.writeValue.address = words_ + index * sizeof(uint32_t);
    operation.writeValue.value = value;
    // With a fence in front, so that what was copied before is there for whoever sees the value.
    operation.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  }

  void add_wait(size_t index, uint32_t value) {
    CUstreamBatchMemOpParams& operation = operations_.emplace_back();
    std::memset(&operation, 0, sizeof(operation));
    operation.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    operation.waitValue.address = words_ + index * sizeof(uint32_t);
    operation.waitValue.value = value;
    operation.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;  // cyclically: the numbers may wrap
  }

  void submit() {
    const CUresult result = memory_operations_(reinterpret_cast<CUstream>(stream()),
                                               static_cast<unsigned int>(operations_.size()), operations_.data(), 0);
    LDC_CHECK(result == CUDA_SUCCESS, "cuStreamBatchMemOp failed with error ", static_cast<int>(result),
              result == CUDA_ERROR_NOT_SUPPORTED ? " (not supported)" : "", ".");
  }

  /// The ring of words holds for fewer than `kRing` outstanding barriers; the host rarely is that far ahead.
  void stay_close_to_device(uint32_t number) const {
    constexpr uint32_t kAhead = SignalPad::kRing / 2;
    if (number <= kAhead) return;
    const uint32_t reached = number - kAhead;
    while (!released_ && static_cast<int32_t>(pad_.load(pad_.index(reached, rank_, rank_)) - reached) < 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  const int64_t rank_, world_size_;
  const Device device_;
  mutable std::mutex pad_mutex_;  // whether the pad is there; release() and behind() come from other threads
  SignalPad pad_;
  std::vector<std::byte*> bases_;
  std::byte* own_ = nullptr;
  int64_t bytes_ = 0;
  bool registered_ = false;
  CUdeviceptr words_ = 0;  // the pad, for the device
  StreamBatchMemOp memory_operations_ = nullptr;
  bool batches_ = false;
  std::atomic<uint32_t> number_ = 0;  // of barriers
  std::atomic<bool> released_ = false;
  // Scratch.
  std::vector<CUstreamBatchMemOpParams> operations_;
  std::vector<void*> to_;
  std::vector<const void*> from_;
  std::vector<size_t> sizes_;
};

}  // namespace

std::shared_ptr<PeerMemory> make_cuda_peer_memory(int64_t rank, int64_t world_size, Device device) {
  return std::make_shared<CudaPeerMemory>(rank, world_size, device);
}

}  // namespace ldc

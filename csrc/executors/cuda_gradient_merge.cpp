#include "executors/cuda_gradient_merge.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <array>

#include "base/cuda_driver.h"
#include "executors/cuda_gradient_merge_ptx.h"
#include "memory/views.h"

namespace ldc {
namespace {

constexpr int64_t kBlocks = 64;  // fewer take longer than they spare matmuls, more do not end sooner
constexpr unsigned int kThreads = 1024;
constexpr int64_t kPacket = 4;       // elements that a thread stores at once: neighbours fill whole sectors (PTX)
constexpr int64_t kLeast = 1 << 20;  // elements below which torch's kernel is over before anybody notices

class CudaGradientMerge final : public GradientMerge {
 public:
  CudaGradientMerge(Device device, int64_t blocks) : device_(device), blocks_(blocks > 0 ? blocks : kBlocks) {}

  ~CudaGradientMerge() override {
    if (module_ != nullptr) unload_(module_);
  }

  void merge(const std::vector<Merge>& merges) override {
    std::vector<Merge> others;
    for (const auto& [grad, sum, add] : merges) {
      const int64_t packets = fits(grad, sum) && load() ? grad.numel() / kPacket : 0;
      if (packets > 0) launch(kernels_[add ? 1 : 0], grad, sum, packets);
      const int64_t done = packets * kPacket;
      const int64_t rest = grad.numel() - done;
      if (rest > 0) others.push_back({flat(grad).narrow(0, done, rest), flat(sum).narrow(0, done, rest), add});
    }
    GradientMerge::merge(others);
  }

 private:
  bool fits(const Tensor& grad, const Tensor& sum) const {
    const auto aligned = [](const Tensor& tensor) { return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0; };
    return grad.device() == device_ && sum.device() == device_ && grad.scalar_type() == c10::kFloat &&
           sum.scalar_type() == c10::kBFloat16 && grad.numel() == sum.numel() && grad.numel() >= kLeast &&
           grad.is_contiguous() && sum.is_contiguous() && aligned(grad) && aligned(sum);
  }

  /// Whether the kernels are there; they are loaded with the first call. A driver that refuses them is no reason to
  /// stop: torch's own kernels do the same.
  bool load() {
    if (tried_) return kernels_[1] != nullptr;
    tried_ = true;
    const c10::DeviceGuard guard(device_);
    try {
      check_cuda(cudaFree(nullptr), "cudaFree");  // makes the device's context the current one
      launch_ = driver_function<decltype(launch_)>("cuLaunchKernel", 4000);
      unload_ = driver_function<decltype(unload_)>("cuModuleUnload", 2000);
      const auto get = driver_function<CUresult (*)(CUfunction*, CUmodule, const char*)>("cuModuleGetFunction", 2000);
      const auto load = driver_function<CUresult (*)(CUmodule*, const void*)>("cuModuleLoadData", 2000);
      check(load(&module_, kGradientMergePtx), "cuModuleLoadData");
      check(get(&kernels_[0], module_, "merge_copy"), "cuModuleGetFunction");
      check(get(&kernels_[1], module_, "merge_add"), "cuModuleGetFunction");
    } catch (const c10::Error& error) {
      kernels_ = {};
      TORCH_WARN("lightning_deepcompile: gradients are merged by torch's kernels, beside which compute stands still: ",
                 error.what_without_backtrace());
    }
    return kernels_[1] != nullptr;
  }

  void launch(CUfunction function, const Tensor& grad, const Tensor& sum, int64_t packets) const {
    const c10::DeviceGuard guard(device_);
    void* to = grad.data_ptr();
    const void* from = sum.const_data_ptr();
    auto count = static_cast<uint64_t>(packets);
    std::array<void*, 3> arguments{&to, &from, &count};
    const auto useful = (count + kThreads - 1) / kThreads;
    const auto blocks = static_cast<unsigned int>(std::min<uint64_t>(useful, static_cast<uint64_t>(blocks_)));
    const auto stream = static_cast<CUstream>(current_stream(device_).native_handle());
    check(launch_(function, blocks, 1, 1, kThreads, 1, 1, 0, stream, arguments.data(), nullptr), "cuLaunchKernel");
  }

  static void check(CUresult result, const char* call) {
    LDC_CHECK(result == CUDA_SUCCESS, call, " failed with error ", static_cast<int>(result), ".");
  }

  const Device device_;
  const int64_t blocks_;
  bool tried_ = false;
  CUmodule module_ = nullptr;
  std::array<CUfunction, 2> kernels_{};  // copy, add
  CUresult (*launch_)(CUfunction, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
                      unsigned int, CUstream, void**, void**) = nullptr;
  CUresult (*unload_)(CUmodule) = nullptr;
};

}  // namespace

std::unique_ptr<GradientMerge> make_cuda_gradient_merge(Device device, int64_t blocks) {
  return std::make_unique<CudaGradientMerge>(device, blocks);
}

}  // namespace ldc

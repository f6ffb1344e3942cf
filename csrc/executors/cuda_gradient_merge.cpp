#include "executors/cuda_gradient_merge.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <array>
#include <string>

#include "base/cuda_driver.h"
#include "memory/views.h"

namespace ldc {
namespace {

constexpr int64_t kBlocks = 64;  // fewer take longer than they spare matmuls, more do not end sooner
constexpr unsigned int kThreads = 1024;
constexpr int64_t kPacket = 4;       // elements that a thread stores at once: neighbours fill whole sectors
constexpr int kAtOnce = 4;           // packets that a thread has on their way
constexpr int64_t kLeast = 1 << 20;  // elements below which torch's kernel is over before anybody notices

/// A kernel as PTX, which the driver compiles: building the extension takes no nvcc. In CUDA C++:
///
///   for (uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < packets; i += gridDim.x * blockDim.x)
///     for (int k = 0; k < 4; ++k) grad[4 * i + k] = (add ? grad[4 * i + k] : 0) + float(sum[4 * i + k]);
///
/// with the loads of several rounds before the first store. A bfloat16 is the upper half of the float32 of its value.
std::string kernel(const std::string& name, bool add) {
  std::string text = ".visible .entry " + name + R"((.param .u64 grad, .param .u64 sum, .param .u64 packets)
{
  .reg .pred %here<4>;
  .reg .b32 %threads, %blocks, %block, %thread, %low<4>, %high<4>;
  .reg .f32 %w<4>, %g<16>;
  .reg .b64 %packets, %sum, %grad, %i, %stride, %from, %to<4>;

  ld.param.u64 %grad, [grad];
  ld.param.u64 %sum, [sum];
  ld.param.u64 %packets, [packets];
  cvta.to.global.u64 %grad, %grad;
  cvta.to.global.u64 %sum, %sum;
  mov.u32 %threads, %ntid.x;
  mov.u32 %blocks, %nctaid.x;
  mov.u32 %block, %ctaid.x;
  mov.u32 %thread, %tid.x;
  mul.wide.u32 %stride, %threads, %blocks;
  mul.wide.u32 %i, %block, %threads;
  cvt.u64.u32 %from, %thread;
  add.u64 %i, %i, %from;
next:
)";
  for (int round = 0; round < kAtOnce; ++round) {
    const std::string r = std::to_string(round), g = std::to_string(4 * round);
    text += "  setp.lt.u64 %here" + r + ", %i, %packets;\n" +
            "  shl.b64 %from, %i, 3;\n"
            "  add.u64 %from, %sum, %from;\n"
            "  @%here" + r + " ld.global.v2.b32 {%low" + r + ", %high" + r + "}, [%from];\n" +
            "  shl.b64 %to" + r + ", %i, 4;\n"
            "  add.u64 %to" + r + ", %grad, %to" + r + ";\n";
    if (add) {
      text += "  @%here" + r + " ld.global.v4.f32 {%g" + g + ", %g" + std::to_string(4 * round + 1) + ", %g" +
              std::to_string(4 * round + 2) + ", %g" + std::to_string(4 * round + 3) + "}, [%to" + r + "];\n";
    }
    text += "  add.u64 %i, %i, %stride;\n";
  }
  for (int round = 0; round < kAtOnce; ++round) {
    const std::string r = std::to_string(round);
    text += "  shl.b32 %w0, %low" + r + ", 16;\n" +
            "  and.b32 %w1, %low" + r + ", 0xffff0000;\n" +
            "  shl.b32 %w2, %high" + r + ", 16;\n" +
            "  and.b32 %w3, %high" + r + ", 0xffff0000;\n";
    for (int k = 0; add && k < kPacket; ++k) {
      const std::string w = "%w" + std::to_string(k);
      text += "  add.rn.f32 " + w + ", %g" + std::to_string(4 * round + k) + ", " + w + ";\n";
    }
    text += "  @%here" + r + " st.global.v4.f32 [%to" + r + "], {%w0, %w1, %w2, %w3};\n";
  }
  return text + R"(  setp.lt.u64 %here0, %i, %packets;
  @%here0 bra next;
  ret;
}
)";
}

class CudaGradientMerge final : public GradientMerge {
 public:
  CudaGradientMerge(Device device, int64_t blocks) : device_(device), blocks_(blocks > 0 ? blocks : kBlocks) {}

  ~CudaGradientMerge() override {
    if (module_ != nullptr) unload_(module_);
  }

  void merge(const Tensor& grad, const Tensor& sum, bool add) override {
    const int64_t packets = fits(grad, sum) && load() ? grad.numel() / kPacket : 0;
    if (packets == 0) return GradientMerge::merge(grad, sum, add);
    launch(kernels_[add ? 1 : 0], grad, sum, packets);
    const int64_t done = packets * kPacket;
    const int64_t rest = grad.numel() - done;
    if (rest > 0) GradientMerge::merge(flat(grad).narrow(0, done, rest), flat(sum).narrow(0, done, rest), add);
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
      const std::string code = ".version 7.0\n.target sm_70\n.address_size 64\n\n" + kernel("merge_copy", false) +
                               "\n" + kernel("merge_add", true);
      check(load(&module_, code.c_str()), "cuModuleLoadData");
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

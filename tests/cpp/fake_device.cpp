#include "fake_device.h"

#include <ATen/InferSize.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <utility>

#include "memory/views.h"

namespace ldc::testing {

FakeDevice& FakeDevice::instance() {
  static FakeDevice fake;
  return fake;
}

at::Tensor FakeDevice::tensor(const at::Tensor& host) const {
  return at::for_blob(host.mutable_data_ptr(), host.sizes())
      .strides(host.strides())
      .context(new at::Tensor(host), [](void* kept) { delete static_cast<at::Tensor*>(kept); })
      .target_device(device())
      .options(host.options().device(device()))
      .make_tensor();
}

namespace {

FakeDevice& fake() { return FakeDevice::instance(); }

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return fake().device().type(); }
  c10::Device exchangeDevice(c10::Device device) const override { return device; }
  c10::Device getDevice() const override { return fake().device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream(fake().current); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(++fake().made); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(std::exchange(fake().current, next.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new FakeDevice::Clock;
    FakeDevice::Clock& clock = fake().clocks[on.id()];
    ++clock[on.id()];
    *static_cast<FakeDevice::Clock*>(*event) = clock;
  }
  void block(void* event, const c10::Stream& waiting) const override {
    FakeDevice::Clock& clock = fake().clocks[waiting.id()];
    for (const auto& [stream, point] : *static_cast<FakeDevice::Clock*>(event)) {
      clock[stream] = std::max(clock[stream], point);
    }
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { TORCH_CHECK(!fake().lost, "the device is lost"); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<FakeDevice::Clock*>(event);
  }

 private:
  static c10::Stream stream(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, fake().device(), id);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat>) {
  fake().allocations.push_back(fake().current);
  return at::empty(size, at::TensorOptions().dtype(dtype));
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  fake().allocations.push_back(fake().current);
  return at::empty_strided(size, stride, at::TensorOptions().dtype(dtype));
}

/// The same memory as a tensor of the host.
at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(),
                       tensor.options().device(c10::DeviceType::CPU));
}

at::Tensor& copy(at::Tensor& target, const at::Tensor& source, bool) {
  on_host(target).copy_(on_host(source));
  fake().copies.push_back(fake().queue(fake().current));
  return target;
}

/// Of contiguous tensors.
at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef sizes) {
  const auto shape = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(sizes), tensor.numel());
  return typed_view(tensor, tensor.storage_offset() * tensor.element_size(), shape, tensor.scalar_type());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("view", &view);
  m.impl("copy_", &copy);
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
}

}  // namespace
}  // namespace ldc::testing

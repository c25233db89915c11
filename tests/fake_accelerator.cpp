// An accelerator that every machine has: PyTorch's PrivateUse1, whose kernels are those of the CPU on copies.
//
// Its memory is the process's, at addresses that the host cannot read: code that takes one of its tensors for host
// memory ends with a signal. An operation on its tensors and on others of the host is an error, as on a GPU.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

constexpr auto kFake = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
// Beyond the addresses that a processor takes from a program.
constexpr uintptr_t kAway = uintptr_t{1} << 62;

thread_local c10::DeviceIndex current = 0;

void* away(void* real) { return real ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(real) | kAway) : nullptr; }
void* real(const void* there) { return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(there) & ~kAway); }
void release(void* there) { std::free(real(there)); }

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* there = away(nbytes ? std::malloc(nbytes) : nullptr);
    return {there, there, &release, c10::Device(kFake, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    std::memcpy(real(target), real(source), nbytes);
  }
};

Memory memory;
REGISTER_ALLOCATOR(kFake, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFake; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kFake, current}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there are ", int(kDevices), " fake devices, not number ", device.index());
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = index; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current, index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current, index < 0 ? current : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto resized = memory.allocate(nbytes);
    memory.copy_data(resized.mutable_get(), storage.data(), std::min(nbytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(resized));
    storage.set_nbytes(nbytes);
  }
};

Hooks hooks;

// Returns the same elements as a tensor of the host.
at::Tensor here(const at::Tensor& tensor) {
  if (tensor.device().type() != kFake) return tensor;
  auto options = tensor.options().device(c10::kCPU);
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(real(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  here(target).copy_(here(source));
  return target;
}

const at::Tensor& resize_fake(const at::Tensor& tensor, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  auto storage = tensor.storage();
  size_t needed = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize();
  if (needed > storage.nbytes()) hooks.resizePrivateUse1Bytes(storage, needed);
  return tensor;
}

at::Tensor copy_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) resize_fake(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}

at::Scalar scalar_of(const at::Tensor& tensor) { return at::native::_local_scalar_dense_cpu(here(tensor)); }

at::Tensor& set_storage(
    at::Tensor& result, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(result, std::move(storage), offset, size, stride);
}

// By itself, because its schema does not say that it changes the running statistics.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum,
    double eps) {
  auto near = [](const std::optional<at::Tensor>& each) {
    return each && each->defined() ? std::optional<at::Tensor>(here(*each)) : std::nullopt;
  };
  auto [normal, means, scales] = at::native_batch_norm(
      here(input), near(weight), near(bias), near(mean), near(variance), training, momentum, eps);
  return {normal.to(input.device()), means.to(input.device()), scales.to(input.device())};
}

void require_same_device(const std::string& name, const at::Tensor& tensor) {
  bool elsewhere = tensor.defined() && tensor.device().type() != kFake && tensor.dim() > 0;
  TORCH_CHECK(!elsewhere, name, " takes a tensor on ", tensor.device(), " beside tensors on the accelerator");
}

void on_copies(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  // PyTorch's kernels of GPUs take indices that lie on the host, too.
  if (name.find("index") == std::string::npos) {
    for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
      if (value.isTensor()) require_same_device(name, value.toTensor());
      if (value.isTensorList()) {
        for (const at::Tensor& each : value.toTensorVector()) require_same_device(name, each);
      }
    }
  }
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_and_resize);
  m.impl("_local_scalar_dense", scalar_of);
  m.impl("resize_", resize_fake);
  m.impl("native_batch_norm", batch_norm);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_copies>()); }

TORCH_LIBRARY(headrace_fake, m) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

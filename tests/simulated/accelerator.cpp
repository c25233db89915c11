// An accelerator that every machine has: PyTorch's PrivateUse1, whose kernels are those of the CPU on copies.
//
// Its memory is the process's, at addresses that the host cannot read: code that takes one of its tensors for host
// memory ends with a signal. An operation on its tensors and on others of the host is an error, as on a GPU. What it
// knows of streams, waits and memory is in device.hpp.

#include "device.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
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

namespace simulated {
namespace {

c10::DeviceIndex devices = 2;
thread_local c10::DeviceIndex current = 0;

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* there = bytes ? simulated::allocate(bytes, current) : nullptr;
    return {there, there, &release, c10::Device(kFake, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(real(target), real(source), bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& there, c10::Stream stream) override {
    record_use(there.get(), number_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock(simulation().lock);
    const auto& memory = simulation().memory[device];
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* each : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*each)[0].current = memory.current;
      (*each)[0].peak = memory.peak;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock(simulation().lock);
    simulation().memory[device].peak = simulation().memory[device].current;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Lock lock(simulation().lock);
    const auto& memory = simulation().memory[device];
    return {size_t(memory.most - memory.current), size_t(memory.most)};
  }
};

Allocator allocator;
REGISTER_ALLOCATOR(kFake, &allocator);

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* there = pin(bytes);
    return {there, there, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* target, const void* source, size_t bytes) const override { std::memcpy(target, source, bytes); }
};

PinnedAllocator pinned_allocator;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFake; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kFake, current}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < devices, "there are ", int(devices), " fake devices, not number ", device.index());
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return devices; }

  static c10::Stream numbered(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kFake, device.has_index() ? device.index() : current), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return numbered(device, current_streams[device.has_index() ? device.index() : current]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return numbered(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    Lock lock(simulation().lock);
    auto& next = simulation().next_stream[device.has_index() ? device.index() : current];
    next = next % (kStreams - 1) + 1;
    return numbered(device, next);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto& own = current_streams[stream.device_index()];
    return numbered(stream.device(), std::exchange(own, stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    auto& all = simulation();
    Lock lock(all.lock);
    if (!all_open(all.streams[number_of(stream)].gates)) return false;
    arrive(all, lock, all.streams[number_of(stream)]);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    count_wait(kStreamSyncs, "synchronize of a stream");
    auto& all = simulation();
    Lock lock(all.lock);
    arrive(all, lock, all.streams[number_of(stream)]);
    raise_fault(all);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    count_wait(kDeviceSyncs, "synchronize of a device");
    auto& all = simulation();
    Lock lock(all.lock);
    for (int each = 0; each < kStreams; ++each) arrive(all, lock, all.streams[device * kStreams + each]);
    raise_fault(all);
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    auto& all = simulation();
    Lock lock(all.lock);
    auto& own = *static_cast<Event*>(*event);
    own.at = all.streams[number_of(stream)];
    own.asked = false;
    own.time = std::chrono::steady_clock::now();
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) return;
    auto& all = simulation();
    Lock lock(all.lock);
    all.streams[number_of(stream)].join(static_cast<Event*>(event)->at);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto& all = simulation();
    Lock lock(all.lock);
    auto& own = *static_cast<Event*>(event);
    bool pending = std::any_of(all.deliveries.begin(), all.deliveries.end(), [&](const Delivery& one) {
      return own.at.done[one.stream] >= one.number;
    });
    // Once "not yet", so that what does not look at the answer is found.
    if (!all_open(own.at.gates) || (pending && !std::exchange(own.asked, true))) return false;
    arrive(all, lock, own.at);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    count_wait(kEventSyncs, "synchronize of an event");
    if (!event) return;
    auto& all = simulation();
    Lock lock(all.lock);
    arrive(all, lock, static_cast<Event*>(event)->at);
    raise_fault(all);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    std::chrono::duration<double, std::milli> between = static_cast<Event*>(to)->time - static_cast<Event*>(from)->time;
    return between.count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& there, const c10::Stream& stream) const override {
    record_use(there.get(), number_of(stream));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return devices > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return devices; }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice({kFake, index}); }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current, index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current, index < 0 ? current : index);
  }
  bool isPinnedPtr(const void* there) const override { return is_pinned(there); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Device getDeviceFromPtr(void* there) const override {
    Lock lock(simulation().lock);
    Block* block = block_of(simulation(), real(there));
    TORCH_CHECK(block, "no memory of a fake device");
    return {kFake, c10::DeviceIndex(block->device)};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto resized = allocator.allocate(bytes);
    if (bytes && storage.nbytes()) {
      allocator.copy_data(resized.mutable_get(), storage.data(), std::min(bytes, storage.nbytes()));
    }
    storage.set_data_ptr_noswap(std::move(resized));
    storage.set_nbytes(bytes);
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
      size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

int stream_of(const at::Tensor& tensor) { return current_stream(tensor.device().index()); }

void copy_to_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  Launch launch("a copy to the host", stream_of(source));
  if (!launch.active()) {
    here(target).copy_(here(source));
    return;
  }
  launch.use(source, false);
  count(kReadBytes, int64_t(source.nbytes()));
  auto& all = launch.all();
  auto* address = static_cast<char*>(target.mutable_data_ptr());
  auto found = all.pinned.upper_bound(address);
  bool pinned = found != all.pinned.begin() && address < std::prev(found)->first + std::prev(found)->second;
  if (non_blocking && pinned && target.numel()) {
    count(kPinnedReads);
    end_reads(all, all.streams[launch.stream()], address, address + target.nbytes());
    at::Tensor content = here(source).to(target.scalar_type(), false, true).contiguous();
    // What a read before the event finds.
    bool counts = at::isIntegralType(target.scalar_type(), true);
    target.fill_(!counts ? std::nan("") : target.scalar_type() == at::kByte ? 255.0 : -1.0);
    all.deliveries.push_back(
        {launch.stream(), launch.number(), address, target.sizes().vec(), target.strides().vec(), content, true});
    return;
  }
  count_wait(kReads, "a copy to the host");
  target.copy_(here(source));
  arrive(all, launch.lock(), all.streams[launch.stream()]);
}

void copy_from_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  bool pinned = !inside && source.numel() && is_pinned(source.const_data_ptr());
  Launch launch("a copy from the host", stream_of(target));
  launch.use(target, true);
  if (launch.active() && pinned) {
    auto* first = static_cast<const char*>(source.const_data_ptr());
    end_writes(launch.all(), launch.all().streams[launch.stream()], first, first + source.nbytes());
  }
  here(target).copy_(source);
  if (!launch.active()) return;
  auto& all = launch.all();
  count(kWriteBytes, int64_t(target.nbytes()));
  if (!non_blocking) {
    count_wait(kBlockingWrites, "a copy from the host");
    arrive(all, launch.lock(), all.streams[launch.stream()]);
  } else if (pinned) {
    count(kPinnedWrites);
    auto* address = static_cast<char*>(const_cast<void*>(source.const_data_ptr()));
    auto content = at::empty(source.sizes(), source.options().pinned_memory(false)).copy_(source);
    all.deliveries.push_back(
        {launch.stream(), launch.number(), address, source.sizes().vec(), source.strides().vec(), content, false});
  } else {
    count(kPageableWrites);
  }
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.device().type() != kFake) {
    copy_to_host(source, target, non_blocking);
  } else if (source.device().type() != kFake) {
    copy_from_host(source, target, non_blocking);
  } else {
    // Between two devices both wait for each other, as torch's copies do.
    if (source.device() != target.device() && !inside) {
      Lock lock(simulation().lock);
      simulation().streams[stream_of(source)].join(simulation().streams[stream_of(target)]);
    }
    Launch launch("a copy on the device", stream_of(source));
    launch.use(source, false);
    launch.use(target, true);
    here(target).copy_(here(source));
    if (launch.active()) launch.all().streams[stream_of(target)].join(launch.all().streams[stream_of(source)]);
  }
  return target;
}

const at::Tensor& resize_fake(const at::Tensor& tensor, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  auto storage = tensor.storage();
  size_t needed = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize();
  if (needed > storage.nbytes()) {
    c10::OptionalDeviceGuard guard(tensor.device());
    hooks.resizePrivateUse1Bytes(storage, needed);
  }
  return tensor;
}

at::Tensor copy_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) resize_fake(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}

at::Scalar scalar_of(const at::Tensor& tensor) {
  Launch launch("item", stream_of(tensor));
  launch.use(tensor, false);
  if (launch.active()) {
    count_wait(kItems, ".item()");
    arrive(launch.all(), launch.lock(), launch.all().streams[launch.stream()]);
  }
  return at::native::_local_scalar_dense_cpu(here(tensor));
}

at::Tensor& set_storage(
    at::Tensor& result, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(result, std::move(storage), offset, size, stride);
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  record_use(tensor.storage().data(), number_of(stream));
}

void note_kernel() {
  if (inside) return;
  count(kKernels);
  thread_local bool known = false;
  if (std::exchange(known, true)) return;
  Lock lock(simulation().lock);
  simulation().computing.insert(std::this_thread::get_id());
}

// Begins a kernel that this file has by itself.
void begin(const char* name, std::initializer_list<at::Tensor> reads) {
  note_kernel();
  Launch launch(name, stream_of(*reads.begin()));
  for (const auto& each : reads) launch.use(each, false);
}

at::Tensor there(const at::Tensor& result, const at::Tensor& like) {
  Inside guard;
  return result.defined() ? result.to(like.device()) : result;
}

at::Tensor or_none(const std::optional<at::Tensor>& tensor) { return tensor ? *tensor : at::Tensor(); }

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
    int64_t groups) {
  begin("convolution", {input, weight, or_none(bias)});
  auto near = or_none(bias).defined() ? std::optional<at::Tensor>(here(*bias)) : std::nullopt;
  auto result = at::convolution(
      here(input), here(weight), near, stride, padding, dilation, transposed, output_padding, groups);
  return there(result, input);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  begin("convolution_backward", {gradient, input, weight});
  auto [inputs, weights, biases] = at::convolution_backward(
      here(gradient), here(input), here(weight), at::IntArrayRef{gradient.size(1)}, stride, padding, dilation,
      transposed, output_padding, groups, mask);
  return {there(inputs, input), there(weights, input), there(biases, input)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& cell, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& hidden_bias) {
  begin("_thnn_fused_lstm_cell", {input, hidden, cell, or_none(bias), or_none(hidden_bias)});
  auto gates = here(input) + here(hidden);
  for (const auto& each : {or_none(bias), or_none(hidden_bias)}) {
    if (each.defined()) gates = gates + here(each);
  }
  auto parts = gates.chunk(4, 1);
  auto in = parts[0].sigmoid(), forget = parts[1].sigmoid(), candidate = parts[2].tanh(), out = parts[3].sigmoid();
  auto next = forget * here(cell) + in * candidate;
  auto kept = at::cat({in, forget, candidate, out}, 1);
  return {there(out * next.tanh(), input), there(next, input), there(kept, input)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const std::optional<at::Tensor>& of_hidden, const std::optional<at::Tensor>& of_cell, const at::Tensor& cell,
    const at::Tensor& next, const at::Tensor& kept, bool has_bias) {
  begin("_thnn_fused_lstm_cell_backward", {cell, next, kept, or_none(of_hidden), or_none(of_cell)});
  auto parts = here(kept).chunk(4, 1);
  auto in = parts[0], forget = parts[1], candidate = parts[2], out = parts[3], bent = here(next).tanh();
  auto hidden = or_none(of_hidden).defined() ? here(*of_hidden) : at::zeros_like(bent);
  auto through = hidden * out * (1 - bent * bent);
  if (or_none(of_cell).defined()) through = through + here(*of_cell);
  auto gates = at::cat(
      {through * candidate * in * (1 - in), through * here(cell) * forget * (1 - forget),
       through * in * (1 - candidate * candidate), hidden * bent * out * (1 - out)},
      1);
  auto bias = has_bias ? gates.sum(0) : at::Tensor();
  return {there(gates, cell), there(through * forget, cell), there(bias, cell)};
}

// By itself, because its schema does not say that it changes the running statistics.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum,
    double eps) {
  auto near = [](const std::optional<at::Tensor>& each) {
    return each && each->defined() ? std::optional<at::Tensor>(here(*each)) : std::nullopt;
  };
  note_kernel();
  {
    Launch launch("native_batch_norm", stream_of(input));
    launch.use(input, false);
    for (const auto* each : {&weight, &bias}) {
      if (*each) launch.use(**each, false);
    }
    for (const auto* each : {&mean, &variance}) {
      if (*each) launch.use(**each, training);
    }
  }
  auto [normal, means, scales] = at::native_batch_norm(
      here(input), near(weight), near(bias), near(mean), near(variance), training, momentum, eps);
  Inside guard;
  return {normal.to(input.device()), means.to(input.device()), scales.to(input.device())};
}

void require_same_device(const std::string& name, const at::Tensor& tensor) {
  bool elsewhere = tensor.defined() && tensor.device().type() != kFake && tensor.dim() > 0;
  TORCH_CHECK(!elsewhere, name, " takes a tensor on ", tensor.device(), " beside tensors on the accelerator");
}

template <typename Act>
void each_tensor(const c10::IValue& value, const Act& act) {
  if (value.isTensor()) act(value.toTensor());
  if (value.isTensorList()) {
    for (const at::Tensor& each : value.toTensorVector()) act(each);
  }
  if (value.isList() && !value.isTensorList()) {
    for (const c10::IValue& each : value.toListRef()) {
      if (each.isTensor()) act(each.toTensor());
    }
  }
}

bool is_mask(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
}

// Whether the host must know numbers of the device to go on: how many elements come out, or what is returned.
bool waits(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  static const std::set<std::string> shapes = {
      "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount",
  };
  const auto& schema = op.schema();
  if (shapes.count(schema.name())) return true;
  for (const auto& each : schema.returns()) {
    auto kind = each.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return true;
  }
  if (schema.name() == "aten::repeat_interleave") return arguments.back().isNone();
  if (schema.name().find("index") == std::string::npos) return false;
  bool masked = false;
  for (const auto& each : arguments.slice(1)) {
    if (each.isList()) each_tensor(each, [&](const at::Tensor& tensor) { masked |= is_mask(tensor); });
  }
  return masked;
}

void on_copies(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  auto arguments = torch::jit::last(*stack, schema.arguments().size());
  int device = current;
  bool found = false;
  for (const auto& value : arguments) {
    // PyTorch's kernels of GPUs take indices that lie on the host, too.
    bool anywhere = name.find("index") != std::string::npos;
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (!anywhere) require_same_device(name, tensor);
      if (!found && tensor.defined() && tensor.device().type() == kFake) {
        device = tensor.device().index();
        found = true;
      }
    });
  }
  c10::OptionalDeviceGuard guard(c10::Device(kFake, c10::DeviceIndex(device)));
  note_kernel();
  uint64_t number = 0;
  {
    Launch launch(name, current_stream(device));
    for (size_t at = 0; at < arguments.size(); ++at) {
      const auto* alias = schema.arguments()[at].alias_info();
      each_tensor(arguments[at], [&](const at::Tensor& tensor) { launch.use(tensor, alias && alias->isWrite()); });
    }
    if (launch.active() && name.find("index") != std::string::npos) {
      // Indices that lie on the host are copied first.
      for (const auto& value : arguments) {
        each_tensor(value, [&](const at::Tensor& tensor) {
          if (tensor.defined() && tensor.dim() && tensor.device().type() != kFake) count_wait(kBlockingWrites, name);
        });
      }
    }
    if (launch.active() && waits(op, arguments)) {
      count_wait(kShapes, name);
      arrive(launch.all(), launch.lock(), launch.all().streams[launch.stream()]);
    }
    number = launch.number();
  }
  {
    Inside within;
    at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
  }
  if (inside) return;
  // What has come out is of this operation, not of the allocation.
  auto& all = simulation();
  Lock lock(all.lock);
  const std::string* known = &*all.names.insert(name).first;
  for (const auto& value : torch::jit::last(*stack, schema.returns().size())) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || tensor.device().type() != kFake || !tensor.numel()) return;
      Block* block = block_of(all, real(tensor.const_data_ptr()));
      if (!block || block->accesses.size() != 1 || block->accesses[0].number >= number) return;
      block->accesses[0].number = number;
      block->accesses[0].name = known;
    });
  }
}

// A view of a device's memory for another thread of the host, which does a collective.
at::Tensor view_of(const at::Tensor& tensor) { return here(tensor); }

// Enqueues a collective on a stream: what comes after it waits for its gate.
void enqueue(std::string name, at::TensorList reads, at::TensorList writes, int64_t stream, int64_t gate) {
  Launch launch(name, int(stream), /*gated=*/false);
  for (const auto& each : reads) launch.use(each, false);
  for (const auto& each : writes) launch.use(each, true);
  auto& all = launch.all();
  for (auto list : {reads, writes}) {
    for (const auto& each : list) {
      if (!each.numel()) continue;
      if (Block* block = block_of(all, real(each.const_data_ptr()))) block->recorded.insert(int(stream));
    }
  }
  auto own = all.gates.at(gate);
  own->before = all.streams[stream].gates;
  all.streams[stream].gates.push_back(own);
}

}  // namespace
}  // namespace simulated

using namespace simulated;

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_and_resize);
  m.impl("_local_scalar_dense", scalar_of);
  m.impl("resize_", resize_fake);
  m.impl("native_batch_norm", batch_norm);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("record_stream", record_stream);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_copies>()); }

// Of autocast what models of the tests have.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
  KERNEL_PRIVATEUSEONE(nll_loss, fp32)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
}

TORCH_LIBRARY(headrace_fake, m) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("view_of(Tensor tensor) -> Tensor");
  m.def("enqueue(str name, Tensor[] reads, Tensor[] writes, int stream, int gate) -> ()");
}

TORCH_LIBRARY_IMPL(headrace_fake, CompositeExplicitAutograd, m) {
  m.impl("view_of", view_of);
  m.impl("enqueue", enqueue);
}

extern "C" {

void fake_set_devices(int count) { devices = c10::DeviceIndex(count); }
int64_t fake_counter(int which) {
  auto& all = simulation();
  Lock lock(all.lock);
  if (which != kPinsBesideKernels) return all.counters[which];
  int64_t pins = 0;
  for (auto [thread, times] : all.pins) pins += all.computing.count(thread) ? times : 0;
  return all.counters[which] = pins;
}
void fake_forbid_waits(int on) { simulation().forbids_waits = on; }
void fake_limit(int device, int64_t bytes) { simulation().memory[device].most = bytes; }
int64_t fake_blocks() {
  Lock lock(simulation().lock);
  return int64_t(simulation().blocks.size());
}

void fake_fault(const char* said) {
  Lock lock(simulation().lock);
  note_fault(simulation(), said);
}

int64_t fake_gate() {
  Lock lock(simulation().lock);
  auto number = ++simulation().next_gate;
  simulation().gates[number] = std::make_shared<Gate>();
  return number;
}
// Waits until what came before a collective on its stream is done.
void fake_wait_before(int64_t gate) {
  Lock lock(simulation().lock);
  Gates before = simulation().gates.at(gate)->before;
  simulation().opened.wait(lock, [&] { return all_open(before); });
}
int fake_is_open(int64_t gate) {
  Lock lock(simulation().lock);
  auto found = simulation().gates.find(gate);
  return found == simulation().gates.end() || found->second->open;
}
void fake_open(int64_t gate) {
  Lock lock(simulation().lock);
  auto found = simulation().gates.find(gate);
  if (found == simulation().gates.end()) return;
  found->second->open = true;
  found->second->before.clear();
  simulation().gates.erase(found);
  simulation().opened.notify_all();
}

}  // extern "C"

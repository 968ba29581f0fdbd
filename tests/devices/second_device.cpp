// The smallest device that is not the CPU: PyTorch's PrivateUse1 on host memory. Every operator runs on the CPU, after
// the checks that a GPU would make: tensors of one device (0-dimensional CPU tensors excepted), a generator of its own.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <set>

namespace {

using at::Tensor;
constexpr auto DEVICE = c10::DeviceType::PrivateUse1;
bool without_float64 = false;  // as Apple's MPS
bool rounded_products = false;  // matrix products of 10-bit mantissas, as TF32

// ---- memory

struct HostMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* data = n ? std::malloc(n) : nullptr;
    return {data, data, &std::free, c10::Device(DEVICE, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t n) const override { default_copy_data(to, from, n); }
};
HostMemory memory;
REGISTER_ALLOCATOR(DEVICE, &memory);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DEVICE> {
  c10::Device getDevice() const override { return {DEVICE, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return {DEVICE, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, {DEVICE, 0}); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

at::ScalarType checked(std::optional<at::ScalarType> dtype) {
  const auto type = c10::dtype_or_default(dtype);
  TORCH_CHECK_TYPE(!without_float64 || (type != at::kDouble && type != at::kComplexDouble),
                   "this device has no float64: use float32 instead");
  return type;
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), checked(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), checked(dtype));
}

// The same memory as a CPU tensor.
Tensor host(const Tensor& t) {
  if (!t.is_privateuseone()) return t;
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), [t](void*) {}, at::TensorOptions(t.scalar_type()).device(at::kCPU));
}

// A cast to another device happens here first, as on MPS.
Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  if (from.is_privateuseone()) checked(to.scalar_type());
  host(to).copy_(host(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_output(to, from.sizes());
  return copy_from(from, to, false);
}

at::Scalar number(const Tensor& t) { return host(t).item(); }

// ---- generators

struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(uint64_t seed = c10::default_rng_seed_val) : at::CPUGeneratorImpl(seed) { belong_to(DEVICE); }
  void belong_to(c10::DeviceType type) {
    device_ = type == DEVICE ? c10::Device(DEVICE, 0) : c10::Device(type);
    key_set_ = c10::DispatchKeySet(type == DEVICE ? c10::DispatchKey::PrivateUse1 : c10::DispatchKey::CPU);
  }
};

at::Generator& default_generator() {
  static at::Generator generator = at::make_generator<DeviceGenerator>();
  return generator;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<DeviceGenerator>(); }
  at::Device getDeviceFromPtr(void*) const override { return {DEVICE, 0}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), n);
  }
};

// ---- operators

void check_device(const Tensor& t, const std::string& op, bool written) {
  if (t.defined() && t.is_cpu() && !t.unsafeGetTensorImpl()->is_wrapped_number()) checked(t.scalar_type());
  const bool allowed = !t.defined() || t.is_privateuseone() || (t.is_cpu() && t.dim() == 0 && !written);
  TORCH_CHECK(allowed, "Expected all tensors to be on the same device, but found ", t.device(), " in ", op);
}

Tensor to_tf32(const Tensor& t) {
  if (t.scalar_type() != at::kFloat) return t;
  auto bits = t.contiguous().view(at::kInt);
  return bits.add(0x1000).bitwise_and(at::Scalar(~0x1FFF)).view(at::kFloat);
}

// Run an operator on the CPU, as a device would refuse or round it.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const std::set<std::string> products{"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"};
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const auto begin = stack->size() - arguments.size();
  const bool indexing = schema.name().rfind("aten::index", 0) == 0 || schema.name() == "aten::_index_put_impl_";
  const bool rounds = rounded_products && products.count(schema.name());
  c10::intrusive_ptr<c10::GeneratorImpl> generator;
  if (schema.name() == "aten::cumsum" && (*stack)[begin].toTensor().is_floating_point())
    at::globalContext().alertNotDeterministic("cumsum");  // as on CUDA
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[begin + i];
    const bool written = arguments[i].alias_info() && arguments[i].alias_info()->isWrite();
    if (value.isTensor()) {
      check_device(value.toTensor(), schema.name(), written);
      if (rounds && !written) value = to_tf32(value.toTensor());
    } else if (value.isTensorList()) {
      for (const Tensor& t : value.toTensorVector()) check_device(t, schema.name(), written);
    } else if (value.isList() && !(indexing && arguments[i].name() == "indices")) {  // which may be on the CPU
      for (const at::IValue& v : value.toListRef())
        if (v.isTensor()) check_device(v.toTensor(), schema.name(), written);
    } else if (arguments[i].name() == "generator") {
      const at::Generator given = value.isNone() ? default_generator() : value.toGenerator();
      TORCH_CHECK(given.device().type() == DEVICE, "Expected a generator of this device, but found one of ", given.device());
      generator = given.getIntrusivePtr();
      value = given;
    }
  }
  if (generator) static_cast<DeviceGenerator*>(generator.get())->belong_to(c10::DeviceType::CPU);
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    if (generator) static_cast<DeviceGenerator*>(generator.get())->belong_to(DEVICE);
    throw;
  }
  if (generator) static_cast<DeviceGenerator*>(generator.get())->belong_to(DEVICE);
}

// A GPU draws dropout's mask from its own generator.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {x.clone(), at::ones_like(x, x.options().dtype(at::kBool))};
  const Tensor mask = at::empty_like(x).bernoulli_(1 - p);
  return {x * mask * (p < 1 ? 1 / (1 - p) : 0.), mask.to(at::kBool)};
}

Tensor native_dropout_backward(const Tensor& g, const Tensor& mask, double scale) { return g * mask * scale; }

Tensor rounded(const Tensor& t) { return rounded_products ? to_tf32(host(t)) : host(t); }

Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, c10::IntArrayRef stride,
                   c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
                   int64_t groups) {
  check_device(x, "convolution", true);
  check_device(weight, "convolution", true);
  const auto b = bias && bias->defined() ? std::optional<Tensor>(host(*bias)) : std::nullopt;
  return at::convolution(rounded(x), rounded(weight), b, stride, padding, dilation, transposed, output_padding, groups).to(x.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& g, const Tensor& x, const Tensor& weight,
                                                        c10::IntArrayRef stride, c10::IntArrayRef padding,
                                                        c10::IntArrayRef dilation, bool transposed,
                                                        c10::IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> wanted) {
  const std::vector<int64_t> bias{g.size(1)};
  auto [gx, gw, gb] = at::convolution_backward(rounded(g), rounded(x), rounded(weight), at::OptionalIntArrayRef(bias), stride,
                                               padding, dilation, transposed, output_padding, groups, wanted);
  auto back = [&](const Tensor& t) { return t.defined() ? t.to(g.device()) : t; };
  return {back(gx), back(gw), back(gb)};
}

void set_variant(bool no_float64, bool tf32) {
  without_float64 = no_float64;
  rounded_products = tf32;
}

Tensor get_rng_state() { return default_generator().get_state(); }

void set_rng_state(const Tensor& state) { default_generator().set_state(state); }

void manual_seed(int64_t seed) { default_generator().set_current_seed(seed); }

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("resize_", TORCH_FN(at::native::resize_));
  m.impl("set_", TORCH_FN(at::native::set_cpu_));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(number));
  m.impl("native_dropout", TORCH_FN(native_dropout));
  m.impl("native_dropout_backward", TORCH_FN(native_dropout_backward));
  m.impl("convolution_overrideable", TORCH_FN(convolution));
  m.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
}

TORCH_LIBRARY(second_device, m) {
  m.def("set_variant", &set_variant);
  m.def("get_rng_state", &get_rng_state);
  m.def("set_rng_state", &set_rng_state);
  m.def("manual_seed", &manual_seed);
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

// An accelerator for tests: a second part of main memory under the device name of PrivateUse1.
// What the device computes, the CPU does; what crosses, is copied. It has no streams and no pinned
// memory, and where a test wants so no doubles (as mps), and little memory.
//
// It is built by fake_device.py, against the headers that torch brings along.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {
const auto KIND = c10::DeviceType::PrivateUse1;
std::atomic<int64_t> used{0}, peak{0};
int64_t most = int64_t(1) << 40;
bool has_doubles = true;

struct Held { void* data; size_t size; };
void give_back(void* context) {
  auto* held = static_cast<Held*>(context);
  used -= held->size;
  std::free(held->data);
  delete held;
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    TORCH_CHECK(used + int64_t(size) <= most, "FAKE backend out of memory");
    auto* held = new Held{nullptr, size};
    if (size && posix_memalign(&held->data, 64, size)) throw std::bad_alloc();
    used += size;
    if (used > peak) peak = used.load();
    return {held->data, held, &give_back, c10::Device(KIND, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

// One device, one order of work, done when it is told.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::PrivateUse1;
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return {KIND, 0}; }
  c10::Device getDevice() const override { return {KIND, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, c10::Device(KIND, 0)); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, c10::Device(KIND, 0)); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, c10::Device(KIND, 0)); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void init() const override {}
  bool isPinnedPtr(const void*) const override { return false; }
};
Hooks hooks;

void check(c10::ScalarType type) {
  if (!has_doubles && type == at::kDouble)
    TORCH_CHECK_TYPE(false, "this device has no doubles");
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto dtype = c10::dtype_or_default(type); check(dtype);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype, format);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  auto dtype = c10::dtype_or_default(type); check(dtype);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}
// The same bytes, as a CPU's tensor.
at::Tensor seen(const at::Tensor& x) {
  if (x.is_cpu()) return x;
  return at::from_blob(x.data_ptr(), x.sizes(), x.strides(), [x](void*) {}, x.options().device(at::kCPU));
}
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  seen(to).copy_(seen(from));
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes());
  seen(to).copy_(seen(from));
  return to;
}
at::Scalar scalar(const at::Tensor& x) { return seen(x).item(); }
at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> at = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at);
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
at::Tensor alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
at::Tensor& set_storage(at::Tensor& self, at::Storage from, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(self, from, offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
at::Tensor& set_whole(at::Tensor& self, at::Storage from) {
  int64_t size = from.nbytes() / self.dtype().itemsize();
  return at::native::set_storage_cpu_(self, from, 0, {size}, {});
}
void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &scalar);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &alias);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole);
}

const bool is_registered = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();
}  // namespace

extern "C" {
int64_t fake_used() { return used; }
int64_t fake_peak() { return peak; }
void fake_reset_peak() { peak = used.load(); }
void fake_limit(int64_t bytes) { most = bytes; }
void fake_without_doubles() { has_doubles = false; }
}

// A device of torch's PrivateUse1 whose memory is the host's and whose kernels are those of the CPU.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace {
using at::Tensor;
constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex COUNT = 4;  // devices of a host
// Each process has one device, that of its rank on the host.
c10::Device device() {
  const char* rank = getenv("LOCAL_RANK");
  return c10::Device(KIND, rank ? atoi(rank) : 0);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? malloc(bytes) : nullptr;
    return {data, data, &free, device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t count) const override { memcpy(to, from, count); }
} memory;
REGISTER_ALLOCATOR(KIND, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {  // one device with one stream, on which nothing waits
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, device()); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeDevice(c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return COUNT; }
  c10::DeviceIndex getCurrentDevice() const override { return device().index(); }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  bool isPinnedPtr(const void*) const override { return false; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = memory.allocate(bytes);
    if (bytes && storage.nbytes()) memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
} hooks;

Tensor on_host(const Tensor& x) {  // the same memory
  if (x.is_cpu()) return x;
  auto holder = x;
  return at::from_blob(const_cast<void*>(x.const_data_ptr()), x.sizes(), x.strides(), [holder](void*) {},
                       x.options().device(c10::kCPU));
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}
const Tensor& resize(const Tensor& x, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat>) {
  auto* self = x.unsafeGetTensorImpl();
  self->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t bytes = (x.numel() + x.storage_offset()) * x.element_size();
  if (x.storage().nbytes() < bytes) hooks.resizePrivateUse1Bytes(x.storage(), bytes);
  return x;
}
Tensor& set_storage_offset(Tensor& x, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  x.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  x.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.data()) x.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  else x.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return x;
}
Tensor& set_storage(Tensor& x, c10::Storage source) {
  int64_t n = source.nbytes() / x.element_size();
  return set_storage_offset(x, std::move(source), 0, {n}, {});
}
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Storage", set_storage);
}

std::vector<Tensor> on_host(const std::vector<Tensor>& all) {
  std::vector<Tensor> result;
  for (auto& x : all) result.push_back(on_host(x));
  return result;
}

struct Collectives final : c10d::Backend {  // gloo's, on the same memory
  c10::intrusive_ptr<c10d::Backend> gloo;
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), gloo(std::move(inner)) {}
  const std::string getBackendName() const override { return "neuron"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<Tensor>& x, const c10d::AllreduceOptions& o) override {
    auto y = on_host(x);
    return gloo->allreduce(y, o);
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<Tensor>& x, const c10d::BroadcastOptions& o) override {
    auto y = on_host(x);
    return gloo->broadcast(y, o);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    auto y = on_host(out), x = on_host(in);
    return gloo->_allgather_base(y, x, o);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(Tensor& out, Tensor& in,
                                                      const c10d::ReduceScatterOptions& o) override {
    auto y = on_host(out), x = on_host(in);
    return gloo->_reduce_scatter_base(y, x, o);
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& o) override { return gloo->barrier(o); }
};
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  py::class_<Collectives, c10d::Backend, c10::intrusive_ptr<Collectives>>(m, "Collectives")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>>());
}

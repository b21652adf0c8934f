// A device for tests, torch's PrivateUse1: the memory is the host's, the kernels are the CPU's. It has no FP64, as
// Apple's MPS and Intel's Arc: a tensor of that type cannot be made there. `called` has the operators that ran there.
//
// It counts what a GPU would pay for: bytes that it holds, bytes copied to and from the host by type, and the times
// that the host waits for it. A copy to the host with non_blocking=True arrives only when the host waits: until then
// the destination is full of NaN bytes. With `refuse_reads`, a read of a number by the host raises.

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/stl.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr auto kind = c10::DeviceType::PrivateUse1;
std::mutex mutex;  // autograd has a thread for the device
std::set<std::string> called;
bool has_fp64 = false, reads_refused = false;
std::map<std::string, int64_t> counts;                      // "held", "peak", "waits", "down BFloat16", "up Float", ...
std::map<void*, size_t> blocks;                             // the memory of the device
std::vector<std::pair<at::Tensor, at::Tensor>> on_the_way;  // (value when it was queued, destination on the host)
thread_local bool falls_back = false;  // the CPU's kernel of an operator: its copies are not the device's

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = ::operator new(bytes);
    std::lock_guard lock(mutex);
    blocks[data] = bytes;
    counts["peak"] = std::max(counts["peak"], counts["held"] += static_cast<int64_t>(bytes));
    return {data, data, raw_deleter(), c10::Device(kind, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* data) {
      std::lock_guard lock(mutex);
      if (auto found = blocks.find(data); found != blocks.end()) {
        counts["held"] -= static_cast<int64_t>(found->second);
        blocks.erase(found);
      }
      ::operator delete(data);
    };
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(kind, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::Device here{kind, 0};
  c10::Stream stream{c10::Stream::DEFAULT, here};
  c10::DeviceType type() const override { return kind; }
  c10::Device exchangeDevice(c10::Device) const override { return here; }
  c10::Device getDevice() const override { return here; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return stream; }
  c10::Stream exchangeStream(c10::Stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto made = memory.allocate(bytes);
    std::memcpy(made.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(made));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  auto type = c10::dtype_or_default(dtype);
  TORCH_CHECK_TYPE(has_fp64 || (type != at::kDouble && type != at::kComplexDouble), "this device has no FP64");
  return at::detail::empty_strided_generic(sizes, strides, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           type);
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  auto strides = at::empty({0}, at::kByte).new_empty(sizes).strides().vec();
  auto made = empty_strided(sizes, strides, dtype, layout, device, pin);
  if (format && *format != at::MemoryFormat::Preserve) made.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return made;
}

// The CPU's view of the memory of a tensor.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

// Lets all copies arrive, for the host waits.
void wait() {
  decltype(on_the_way) arrived;
  {
    std::lock_guard lock(mutex);
    ++counts["waits"];
    arrived.swap(on_the_way);
  }
  for (auto& [value, to] : arrived) to.copy_(value);
}

void count(const char* way, const at::Tensor& moved) {
  std::lock_guard lock(mutex);
  counts[std::string(way) + " " + c10::toString(moved.scalar_type())] += static_cast<int64_t>(moved.nbytes());
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!falls_back && to.is_cpu()) {
    count("down", from);
    if (non_blocking && to.is_non_overlapping_and_dense() && from.scalar_type() == to.scalar_type()) {
      const at::Tensor value = on_cpu(from).clone();
      std::memset(to.data_ptr(), 0xff, to.nbytes());
      std::lock_guard lock(mutex);
      on_the_way.emplace_back(value, to.detach());
      return to;
    }
    wait();
  } else if (!falls_back && from.is_cpu()) {
    count("up", to);
  }
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  size_t bytes = (self.storage_offset() + self.numel()) * self.element_size();
  if (bytes > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  return self;
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides,
                      std::optional<int64_t> offset) {
  return at::cpu::as_strided(self, sizes, strides, offset);
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef sizes) { return at::cpu::view(self, sizes); }

at::Tensor& set(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  impl->set_sizes_and_strides(sizes, strides, offset);
  return self;
}

at::Scalar read(const at::Tensor& self) {
  TORCH_CHECK(!reads_refused, "the host reads a number of this device, which refuses that");
  if (!falls_back) wait();
  return on_cpu(self).item();
}

void other(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  {
    std::lock_guard lock(mutex);
    called.insert(toString(op.operator_name()));
  }
  struct Within {
    bool before = std::exchange(falls_back, true);
    ~Within() { falls_back = before; }
  } within;
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", [](const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides) {
    return at::cpu::as_strided(self, sizes, strides, self.storage_offset());
  });
  m.impl("resize_", &resize);
  m.impl("is_set_to", [](const at::Tensor& self, const at::Tensor& other) {
    return self.is_alias_of(other) && self.storage_offset() == other.storage_offset() &&
           self.sizes() == other.sizes() && self.strides() == other.strides();
  });
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &read);
  m.impl("set_.source_Storage_storage_offset", &set);
  m.impl("set_.source_Storage", [](at::Tensor& self, at::Storage source) -> at::Tensor& {
    const auto count = static_cast<int64_t>(source.nbytes() / self.element_size());
    return set(self, source, 0, {count}, {1});
  });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&other>()); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("allow_fp64", [](bool allowed) { has_fp64 = allowed; });
  m.def("refuse_reads", [](bool refused) { reads_refused = refused; });
  m.def("synchronize", &wait);
  m.def("counts", [] {
    std::lock_guard lock(mutex);
    return counts;
  });
  m.def("forget_counts", [] {  // all but what is held
    std::lock_guard lock(mutex);
    const auto held = counts["held"];
    counts = {{"held", held}, {"peak", held}};
  });
  m.def("called", [] {
    std::lock_guard lock(mutex);
    return called;
  });
}

// The ops, each written once: its checks, the choice of FP32 or FP64, its functor. They are templates over a device's
// loop (`CpuLoop` in cpu.cpp, `CudaLoop` in cuda.cu). A loop has
//   device                             the c10::DeviceType it serves
//   reads_late                         whether it reads numbers in memory during its writes, not before them
//   run<T>(Job<N>, functor)            functor, which computes in T, over the tensors of a job: N lists in
//   total(squares)                     the sum of a 1-D float64 tensor, the same whatever the number of threads
//   once(functor)                      functor() one time, on the current device
//
// The checks guard memory, before the first write. `Refused` has no details: amp_patch.multi_tensor catches it, applies
// the same rules in Python, and raises an error with names, indices and a way out.
#pragma once

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/COWDeleter.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <optional>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "functors.h"
#include "tensors.h"

namespace amp_patch {

using Number = std::variant<at::Tensor, double>;
using MaybeTensor = std::optional<at::Tensor>;

struct Refused : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// A tensor's metadata, as a loop needs it. With thousands of small tensors most of the time is spent waiting for the
// memory of torch's metadata, so each tensor is visited once.
struct Fact {
  char* data;  // null if there are no elements
  int64_t numel;
  const void* storage;
  at::ScalarType dtype;
  bool contiguous;
};
using Facts = std::vector<Fact>;

template <int N>
struct Job {
  std::array<const Tensors*, N> in;
  const Tensors* out;  // null if the functor writes nothing; no copy-on-write tensors
  std::array<const Facts*, N> in_facts;
  const Facts* out_facts;
  std::vector<int64_t> indices;  // the tensors of the lists to process; none is empty, all are float64 or none is
  float* found_inf;              // set to 1 if the functor finds a bad value; null: bad values are not flagged
  double* squares;               // if the functor reduces: one sum per tensor of the lists
};

template <class Loop>
struct Ops {
  static void scale(const Tensors& src, const Tensors& dst, const Number& factor, const MaybeTensor& found_inf);
  static void unscale(const Tensors& grads, const Number& inv_scale, const MaybeTensor& found_inf);
  static void axpby(const Tensors& x, const Tensors& y, const Tensors& out, const Number& a, const Number& b,
                    const MaybeTensor& found_inf, bool watch_x, bool watch_y);
  static void check_finite(const Tensors& tensors, const MaybeTensor& found_inf, const Number& factor);
  static std::vector<at::Tensor> l2norm(const Tensors& tensors, const Number& factor, const MaybeTensor& found_inf);
  static std::vector<at::Tensor> unscale_l2norm(const Tensors& grads, const Number& inv_scale,
                                                const MaybeTensor& found_inf);
  static void adopt(const Tensors& params, const Tensors& masters);
  static void update_scale(const at::Tensor& scale, const at::Tensor& growth_tracker, const at::Tensor& found_inf,
                           double growth_factor, double backoff_factor, int growth_interval, double min_scale,
                           double max_scale, int hysteresis, const MaybeTensor& hysteresis_tracker,
                           const MaybeTensor& earlier_inf);
};

// ---------------------------------------------------------------------------------------------------------------------
// Checks

inline void require(bool holds, const char* what) {
  if (!holds) throw Refused(std::string("refused by the extension: ") + what);
}

// Calls visit(i) for i in [0, n), in several threads if n is large, because tensors' metadata is scattered over the
// memory.
template <class Visit>
void for_each_index(size_t n, const Visit& visit) {
  at::parallel_for(0, static_cast<int64_t>(n), 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) visit(i);
  });
}

inline bool is_supported(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kDouble;
}

// Tells whether a storage holds the elements. False for functorch's wrappers, nested tensors and torch's zero tensors,
// and after the storage was freed.
inline bool has_memory(const at::Tensor& t) {
  return t.has_storage() && t.unsafeGetTensorImpl()->storage_initialized() && !t.is_nested();
}

// Refuses anything but a plain strided tensor on `device`; any dtype passes.
inline void check_plain(const at::Tensor& t, c10::Device device) {
  require(t.defined() && t.layout() == at::kStrided, "layout");
  require(!t.key_set().has(c10::DispatchKey::Python), "subclass");  // a DTensor, for example, wraps other memory
  require(!t.is_nested(), "nested");
  require(!t.is_neg(), "lazy negation");
  require(t.device() == device, "device");
}

inline void check_tensor(const at::Tensor& t, c10::Device device) {
  check_plain(t, device);
  require(is_supported(t.scalar_type()), "dtype");
}

// The number of places in memory from the first to the last element, with the gaps between them.
inline int64_t span_of(const at::Tensor& t) {
  int64_t span = 1;
  for (int64_t d = 0; d < t.dim(); ++d) span += (t.size(d) - 1) * t.stride(d);
  return span;
}

inline bool is_coded(at::ScalarType dtype) {
  return dtype == at::kChar || dtype == at::kByte || dtype == at::kFloat8_e4m3fn;
}
inline int64_t item_size(at::ScalarType dtype) {
  return dtype == at::kDouble ? 8 : dtype == at::kFloat ? 4 : is_coded(dtype) ? 1 : 2;
}
inline int64_t bytes_of(const Fact& f) { return f.numel * item_size(f.dtype); }

// Fills in the Fact of a checked tensor, from the TensorImpl: for small tensors, the checks in at::Tensor's own methods
// cost as much as a kernel.
C10_ALWAYS_INLINE void learn(const at::Tensor& t, Fact& fact) {
  const c10::TensorImpl& impl = *t.unsafeGetTensorImpl();
  const c10::StorageImpl* const storage = impl.unsafe_storage().unsafeGetStorageImpl();
  fact.data = nullptr;
  fact.numel = impl.numel();
  fact.storage = storage;
  fact.dtype = t.scalar_type();
  fact.contiguous = impl.is_contiguous();
  require(storage != nullptr, "memory");  // null in functorch's wrappers
  if (fact.numel == 0) return;
  const int64_t item = item_size(fact.dtype), offset = impl.storage_offset() * item;
  const int64_t end = offset + (fact.contiguous ? bytes_of(fact) : span_of(t) * item);
  // Torch's zero tensors, and storages that were freed, have a size and no memory.
  require(storage->data() != nullptr && end <= static_cast<int64_t>(storage->nbytes()), "memory");
  fact.data = static_cast<char*>(const_cast<void*>(storage->data())) + offset;
}

// Refuses an output that shares elements with t: a write would change elements that are read later. An output
// with the same elements as t, in the same order and type, is allowed.
inline void check_overlap(const at::Tensor& t, const Fact& fact, const at::Tensor& out, const Fact& out_fact) {
  if (t.unsafeGetTensorImpl() == out.unsafeGetTensorImpl()) return;
  if (fact.contiguous && out_fact.contiguous) {
    if (fact.data + bytes_of(fact) <= out_fact.data || out_fact.data + bytes_of(out_fact) <= fact.data) return;
    // Compare addresses, not storages: numpy and DLPack make two storages of the same memory.
    return require(fact.data == out_fact.data && fact.dtype == out_fact.dtype, "overlap");
  }
  if (!t.is_alias_of(out)) return;
  const auto status = at::get_overlap_status(t, out);
  require(status != at::MemOverlapStatus::Partial, "overlap");
  require(status != at::MemOverlapStatus::Full || t.scalar_type() == out.scalar_type(), "overlap");
}

inline void check_one(const at::Tensor& t, c10::Device device, at::ScalarType dtype, bool written) {
  require(t.defined() && t.layout() == at::kStrided && !t.key_set().has(c10::DispatchKey::Python) && has_memory(t) &&
              t.numel() == 1 && t.device() == device && !t.is_neg() && t.scalar_type() == dtype,
          "one-element tensor");
  require(!written || !t.requires_grad() || !c10::GradMode::is_enabled(), "requires grad");
}

inline void check_number(const Number& number, c10::Device device) {
  if (const auto* t = std::get_if<at::Tensor>(&number)) {
    require(t->defined(), "number");
    check_one(*t, device, t->scalar_type() == at::kDouble ? at::kDouble : at::kFloat, false);
  }
}

// Tells whether t shares its memory until it is written (torch's copy-on-write).
inline bool is_lazy(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->unsafe_storage().data_ptr().get_deleter() == &c10::impl::cow::cow_deleter;
}

// Refuses two outputs that share elements, because the order of the two writes is undefined. Tensors of one storage
// (views of a flat buffer) are compared by their first and last byte. For a tensor that is not dense, only its first
// element is compared, since more would be expensive.
inline void check_apart(const Tensors& out, const Facts& facts) {
  size_t capacity = 16;
  while (capacity < 2 * facts.size()) capacity *= 2;
  std::vector<const void*> seen(capacity);
  bool shared = false;
  for (size_t i = 0; i < facts.size() && !shared; ++i) {
    if (facts[i].numel == 0) continue;
    const void* const storage = facts[i].storage;
    size_t slot = (reinterpret_cast<uintptr_t>(storage) >> 4) * 0x9E3779B97F4A7C15u >> 20 & (capacity - 1);
    while (seen[slot] != nullptr && seen[slot] != storage) slot = (slot + 1) & (capacity - 1);
    shared = seen[slot] != nullptr;
    seen[slot] = storage;
  }
  if (!shared) return;
  std::vector<std::pair<const char*, const char*>> spans;
  for (size_t i = 0; i < facts.size(); ++i) {
    const Fact& f = facts[i];
    if (f.numel == 0) continue;
    const bool dense = f.contiguous || out[i].is_non_overlapping_and_dense();
    spans.emplace_back(f.data, f.data + (dense ? bytes_of(f) : item_size(f.dtype)));
  }
  std::sort(spans.begin(), spans.end());
  for (size_t i = 1; i < spans.size(); ++i) require(spans[i - 1].second <= spans[i].first, "outputs overlap");
}

// The lists of a call, after `check_lists` has passed them.
template <size_t K>
struct Checked {
  c10::Device device;
  std::array<Facts, K> facts;
};

// Checks the lists of a call before the first write. If `writes` is true, the last list is the output.
template <size_t K>
Checked<K> check_lists(c10::DeviceType type, const std::array<const Tensors*, K>& lists, bool writes,
                       const MaybeTensor& found_inf, std::initializer_list<const Number*> numbers) {
  const Tensors& first = *lists[0];
  c10::Device device(type);
  if (!first.empty() && first[0].defined()) device = first[0].device();
  if (first.empty() && found_inf.has_value() && found_inf->defined()) device = found_inf->device();
  require(device.type() == type, "device");
  Checked<K> checked{device, {}};
  for (size_t k = 0; k < K; ++k) {
    require(lists[k]->size() == first.size(), "length");
    checked.facts[k].resize(first.size());
  }
  const bool recorded = writes && c10::GradMode::is_enabled();  // read here, because each thread has its own grad mode
  std::atomic<bool> lazy{false};
  for_each_index(first.size(), [&](size_t i) {
    for (size_t k = 0; k < K; ++k) {
      lists[k]->prefetch(i + 8);
      const at::Tensor& t = (*lists[k])[i];
      Fact& fact = checked.facts[k][i];
      if (k > 0 && lists[k] == &first) {
        fact = checked.facts[0][i];
        continue;
      }
      check_tensor(t, device);
      learn(t, fact);
      if (k == 0) continue;
      require(t.sizes() == first[i].sizes(), "shape");
      require((fact.dtype == at::kDouble) == (checked.facts[0][i].dtype == at::kDouble), "float64");
    }
    if (!writes) return;
    const at::Tensor& out = (*lists[K - 1])[i];
    const Fact& out_fact = checked.facts[K - 1][i];
    require(!recorded || !out.requires_grad(), "requires grad");
    if (!out_fact.contiguous) require(at::has_internal_overlap(out) != at::MemOverlap::Yes, "overlap");
    for (size_t k = 0; k < K; ++k) check_overlap((*lists[k])[i], checked.facts[k][i], out, out_fact);
    if (is_lazy(out)) lazy.store(true, std::memory_order_relaxed);
  });
  if (writes) check_apart(*lists[K - 1], checked.facts[K - 1]);
  if (found_inf.has_value()) check_one(*found_inf, device, at::kFloat, true);
  for (const Number* number : numbers) check_number(*number, device);
  if (lazy) {  // materialize copy-on-write outputs here: several threads at once would each copy them
    for (size_t i = 0; i < first.size(); ++i) (*lists[K - 1])[i].mutable_data_ptr();
    for (size_t k = 0; k < K; ++k) {
      for (size_t i = 0; i < first.size(); ++i) learn((*lists[k])[i], checked.facts[k][i]);
    }
  }
  return checked;
}

// ---------------------------------------------------------------------------------------------------------------------
// From a checked call to the loop

// The number, or a copy of it if is_output(tensor) finds it in an output, because blocks of a device may write the
// output before others read the number. The caller keeps the result alive until the launch.
template <class Loop, class IsOutput>
Number apart(const Number& number, const IsOutput& is_output) {
  const at::Tensor* const t = std::get_if<at::Tensor>(&number);
  if (!Loop::reads_late || t == nullptr || !is_output(*t)) return number;
  return t->detach().clone();
}

// Compares only storages, which is cheap: a number in another view of an output's buffer is copied needlessly.
template <class Loop>
Number apart(const Number& number, const Facts& outputs) {
  return apart<Loop>(number, [&](const at::Tensor& t) {
    const void* const storage = t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    return std::any_of(outputs.begin(), outputs.end(), [&](const Fact& fact) { return fact.storage == storage; });
  });
}

template <class Loop, class T>
Scalar<T> scalar(const Number& number) {
  if (const double* value = std::get_if<double>(&number)) return {static_cast<T>(*value), nullptr, nullptr};
  const at::Tensor& t = std::get<at::Tensor>(number);
  Scalar<T> there{T(0), nullptr, nullptr};
  if (t.scalar_type() == at::kDouble) {
    there.f64 = t.const_data_ptr<double>();
  } else {
    there.f32 = t.const_data_ptr<float>();
  }
  if (Loop::reads_late) return there;
  there.load();  // before the first write, which may overwrite it in an output
  return {there.value, nullptr, nullptr};
}

// Bumps the version counter, as any in-place op of torch does: autograd and the masters detect writes by it.
inline void bump(const at::Tensor& t) {
  if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

// Launches float64 tensors with make(double()), and the rest of the lists with make(float()).
template <class Loop, int N, size_t K, class Make>
void launch(const Checked<K>& checked, std::array<const Tensors*, N> in, const Tensors* out,
            const MaybeTensor& found_inf, double* squares, Make make) {
  static_assert(K == N || K == N + 1);
  Job<N> narrow{in, out, {}, out != nullptr ? &checked.facts[K - 1] : nullptr, {}, nullptr, squares};
  for (size_t k = 0; k < N; ++k) narrow.in_facts[k] = &checked.facts[k];
  if (found_inf.has_value()) {
    narrow.found_inf = found_inf->mutable_data_ptr<float>();
    bump(*found_inf);
  }
  Job<N> wide = narrow;
  const Facts& first = checked.facts[0];
  narrow.indices.reserve(first.size());
  for (size_t i = 0; i < first.size(); ++i) {
    if (first[i].numel != 0) (first[i].dtype == at::kDouble ? wide : narrow).indices.push_back(static_cast<int64_t>(i));
  }
  if (!narrow.indices.empty()) Loop::template run<float>(narrow, make(float()));
  if (!wide.indices.empty()) Loop::template run<double>(wide, make(double()));
  if (out != nullptr) {
    for_each_index(out->size(), [&](size_t i) { bump((*out)[i]); });
  }
}

// Returns {norm of all tensors, a norm for each tensor}: float64 if any tensor is, else float32.
template <class Loop>
std::vector<at::Tensor> norms(const Facts& tensors, const at::Tensor& squares) {
  at::ScalarType dtype = at::kFloat;
  for (const Fact& f : tensors) {
    if (f.dtype == at::kDouble) dtype = at::kDouble;
  }
  return {Loop::total(squares).sqrt_().to(dtype), squares.sqrt().to(dtype)};
}

inline at::Tensor make_squares(const Tensors& tensors, c10::Device device) {
  return at::zeros({static_cast<int64_t>(tensors.size())}, at::TensorOptions().dtype(at::kDouble).device(device));
}

// ---------------------------------------------------------------------------------------------------------------------
// The ops

template <class Loop>
void Ops<Loop>::scale(const Tensors& src, const Tensors& dst, const Number& factor, const MaybeTensor& found_inf) {
  const auto checked = check_lists<2>(Loop::device, {&src, &dst}, true, found_inf, {&factor});
  const double* number = std::get_if<double>(&factor);
  if (number != nullptr && *number == 1.0 && !found_inf.has_value()) {
    return launch<Loop, 1>(checked, {&src}, &dst, found_inf, nullptr, [](auto zero) { return Copy<decltype(zero)>{}; });
  }
  const Number kept = apart<Loop>(factor, checked.facts[1]);
  launch<Loop, 1>(checked, {&src}, &dst, found_inf, nullptr, [&](auto zero) {
    using T = decltype(zero);
    return Scale<T>{scalar<Loop, T>(kept), T(0)};
  });
}

template <class Loop>
void Ops<Loop>::unscale(const Tensors& grads, const Number& inv_scale, const MaybeTensor& found_inf) {
  scale(grads, grads, inv_scale, found_inf);
}

template <class Loop>
void Ops<Loop>::axpby(const Tensors& x, const Tensors& y, const Tensors& out, const Number& a, const Number& b,
                      const MaybeTensor& found_inf, bool watch_x, bool watch_y) {
  const auto checked = check_lists<3>(Loop::device, {&x, &y, &out}, true, found_inf, {&a, &b});
  const Number kept_a = apart<Loop>(a, checked.facts[2]), kept_b = apart<Loop>(b, checked.facts[2]);
  launch<Loop, 2>(checked, {&x, &y}, &out, found_inf, nullptr, [&](auto zero) {
    using T = decltype(zero);
    return Axpby<T>{scalar<Loop, T>(kept_a), scalar<Loop, T>(kept_b), watch_x, watch_y, T(0)};
  });
}

template <class Loop>
void Ops<Loop>::check_finite(const Tensors& tensors, const MaybeTensor& found_inf, const Number& factor) {
  const auto checked = check_lists<1>(Loop::device, {&tensors}, false, found_inf, {&factor});
  launch<Loop, 1>(checked, {&tensors}, nullptr, found_inf, nullptr, [&](auto zero) {
    using T = decltype(zero);
    return CheckFinite<T>{scalar<Loop, T>(factor)};
  });
}

template <class Loop>
std::vector<at::Tensor> Ops<Loop>::l2norm(const Tensors& tensors, const Number& factor, const MaybeTensor& found_inf) {
  const auto checked = check_lists<1>(Loop::device, {&tensors}, false, found_inf, {&factor});
  const at::Tensor squares = make_squares(tensors, checked.device);
  const auto run = [&](auto norm) {
    launch<Loop, 1>(checked, {&tensors}, nullptr, found_inf, squares.mutable_data_ptr<double>(), norm);
  };
  if (found_inf.has_value()) {
    run([&](auto zero) { return CheckedNorm<decltype(zero)>{{scalar<Loop, decltype(zero)>(factor)}}; });
  } else {
    run([&](auto zero) { return Norm<decltype(zero)>{scalar<Loop, decltype(zero)>(factor)}; });
  }
  return norms<Loop>(checked.facts[0], squares);
}

template <class Loop>
std::vector<at::Tensor> Ops<Loop>::unscale_l2norm(const Tensors& grads, const Number& inv_scale,
                                                  const MaybeTensor& found_inf) {
  const auto checked = check_lists<2>(Loop::device, {&grads, &grads}, true, found_inf, {&inv_scale});
  const at::Tensor squares = make_squares(grads, checked.device);
  const Number kept = apart<Loop>(inv_scale, checked.facts[1]);
  launch<Loop, 1>(checked, {&grads}, &grads, found_inf, squares.mutable_data_ptr<double>(), [&](auto zero) {
    using T = decltype(zero);
    return ScaleNorm<T>{{scalar<Loop, T>(kept), T(0)}};
  });
  return norms<Loop>(checked.facts[0], squares);
}

template <class Loop>
void Ops<Loop>::adopt(const Tensors& params, const Tensors& masters) {
  const auto checked = check_lists<2>(Loop::device, {&params, &masters}, true, std::nullopt, {});
  for (const Fact& f : checked.facts[1]) require(f.dtype == at::kFloat, "dtype");
  launch<Loop, 2>(checked, {&params, &masters}, &masters, std::nullopt, nullptr,
                  [](auto zero) { return Adopt<decltype(zero)>{at::kFloat}; });
}

template <class Loop>
void Ops<Loop>::update_scale(const at::Tensor& scale, const at::Tensor& growth_tracker, const at::Tensor& found_inf,
                             double growth_factor, double backoff_factor, int growth_interval, double min_scale,
                             double max_scale, int hysteresis, const MaybeTensor& hysteresis_tracker,
                             const MaybeTensor& earlier_inf) {
  require(scale.defined() && scale.device().type() == Loop::device, "device");
  check_one(scale, scale.device(), at::kFloat, true);
  check_one(growth_tracker, scale.device(), at::kInt, true);
  check_one(found_inf, scale.device(), at::kFloat, false);
  int* patience = nullptr;
  if (hysteresis_tracker.has_value()) {
    check_one(*hysteresis_tracker, scale.device(), at::kInt, true);
    patience = hysteresis_tracker->mutable_data_ptr<int>();
    bump(*hysteresis_tracker);
  }
  float* earlier = nullptr;
  if (earlier_inf.has_value()) {
    check_one(*earlier_inf, scale.device(), at::kFloat, true);
    earlier = earlier_inf->mutable_data_ptr<float>();
    bump(*earlier_inf);
  }
  const c10::DeviceGuard guard(scale.device());
  Loop::once(UpdateScale{scale.mutable_data_ptr<float>(), growth_tracker.mutable_data_ptr<int>(), patience,
                         found_inf.const_data_ptr<float>(), earlier, growth_factor, backoff_factor, growth_interval,
                         hysteresis, static_cast<float>(min_scale), static_cast<float>(max_scale)});
  bump(scale);
  bump(growth_tracker);
}

}  // namespace amp_patch

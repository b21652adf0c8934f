// Each op once: its checks, the choice of FP32 or FP64, its functor. A template over the device's loop.
//
// A loop has
//   device                             the c10::DeviceType it serves
//   run<T>(Job<N>, functor)            functor, which computes in T, over the tensors of a job: N lists in
//   total(squares)                     the sum of a 1-D float64 tensor, the same whatever the number of threads
//   once(functor)                      functor() one time, on the current device
//
// The checks guard memory, before the first write. Words are Python's: multi_tensor.py sees Refused, finds what is
// wrong by the same rules and says it with names, indices and a way out.
#pragma once

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "functors.h"

namespace amp_patch {

// A list of tensors, borrowed from whoever keeps them alive during the call.
class Tensors {
 public:
  void reserve(size_t n) { items_.reserve(n); }
  void push_back(const at::Tensor* t) { items_.push_back(t); }
  size_t size() const { return items_.size(); }
  bool empty() const { return items_.empty(); }
  const at::Tensor& operator[](size_t i) const { return *items_[i]; }

 private:
  std::vector<const at::Tensor*> items_;
};

using Number = std::variant<at::Tensor, double>;
using MaybeTensor = std::optional<at::Tensor>;

struct Refused : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

template <int N>
struct Job {
  std::array<const Tensors*, N> in;
  const Tensors* out;            // null where the functor writes nothing; no lazy copies
  std::vector<int64_t> indices;  // which tensors of the lists; none is empty, all are float64 or none is
  float* found_inf;              // null: nobody asks
  double* squares;               // where the functor reduces: one sum per tensor of the lists
};

template <class Loop>
struct Ops {
  static void scale(const Tensors& src, const Tensors& dst, const Number& factor, const MaybeTensor& found_inf);
  static void unscale(const Tensors& grads, const Number& inv_scale, const MaybeTensor& found_inf);
  static void axpby(const Tensors& x, const Tensors& y, const Tensors& out, const Number& a, const Number& b,
                    const MaybeTensor& found_inf, bool watch_x, bool watch_y);
  static void check_finite(const Tensors& tensors, const MaybeTensor& found_inf);
  static std::vector<at::Tensor> l2norm(const Tensors& tensors);
  static std::vector<at::Tensor> unscale_l2norm(const Tensors& grads, const Number& inv_scale,
                                                const MaybeTensor& found_inf);
  static void adopt(const Tensors& params, const Tensors& masters);
  static void update_scale(const at::Tensor& scale, const at::Tensor& growth_tracker, const at::Tensor& found_inf,
                           double growth_factor, double backoff_factor, int growth_interval, double min_scale,
                           double max_scale, int hysteresis, const MaybeTensor& hysteresis_tracker);
};

// ---------------------------------------------------------------------------------------------------------------------
// Checks

inline void require(bool holds, const char* what) {
  if (!holds) throw Refused(std::string("refused by the extension: ") + what);
}

// In threads where there are many: their metadata is all over the memory.
template <class Visit>
void for_each_index(size_t n, const Visit& visit) {
  at::parallel_for(0, static_cast<int64_t>(n), 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) visit(i);
  });
}

inline bool is_supported(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kDouble;
}

inline void check_tensor(const at::Tensor& t, c10::Device device) {
  require(t.defined() && t.layout() == at::kStrided, "layout");
  require(!t.key_set().has(c10::DispatchKey::Python), "subclass");  // wrapped memory, a DTensor's say
  require(!t.is_neg(), "lazy negation");
  require(t.device() == device, "device");
  require(is_supported(t.scalar_type()), "dtype");
}

// Where writing out would disturb t: another part of it, or the same elements by another type.
inline void check_overlap(const at::Tensor& t, const at::Tensor& out) {
  if (t.unsafeGetTensorImpl() == out.unsafeGetTensorImpl()) return;
  if (t.is_contiguous() && out.is_contiguous()) {
    const char *p = static_cast<const char*>(t.const_data_ptr()), *q = static_cast<const char*>(out.const_data_ptr());
    if (p + t.nbytes() <= q || q + out.nbytes() <= p) return;
  }
  if (!t.is_alias_of(out)) return;
  const auto status = at::get_overlap_status(t, out);
  require(status != at::MemOverlapStatus::Partial, "overlap");
  require(status != at::MemOverlapStatus::Full || t.scalar_type() == out.scalar_type(), "overlap");
}

inline void check_one(const at::Tensor& t, c10::Device device, at::ScalarType dtype) {
  require(t.defined() && t.layout() == at::kStrided && t.numel() == 1 && t.device() == device && !t.is_neg() &&
              t.scalar_type() == dtype && !t.key_set().has(c10::DispatchKey::Python),
          "one-element tensor");
}

inline void check_number(const Number& number, c10::Device device) {
  if (const auto* t = std::get_if<at::Tensor>(&number)) {
    require(t->defined(), "number");
    check_one(*t, device, t->scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  }
}

// No two outputs share elements: which of the two writes would be last? Tensors of one storage (views of a flat buffer)
// are told apart by their first and last byte, and refused only if both are dense: torch cannot tell the others either.
inline void check_apart(const Tensors& out) {
  size_t capacity = 16;
  while (capacity < 2 * out.size()) capacity *= 2;
  std::vector<const void*> seen(capacity);
  bool shared = false;
  for (size_t i = 0; i < out.size() && !shared; ++i) {
    if (out[i].numel() == 0) continue;
    const void* const storage = out[i].storage().unsafeGetStorageImpl();
    size_t slot = (reinterpret_cast<uintptr_t>(storage) >> 4) * 0x9E3779B97F4A7C15u >> 20 & (capacity - 1);
    while (seen[slot] != nullptr && seen[slot] != storage) slot = (slot + 1) & (capacity - 1);
    shared = seen[slot] != nullptr;
    seen[slot] = storage;
  }
  if (!shared) return;
  std::vector<std::pair<const char*, const char*>> spans;
  for (size_t i = 0; i < out.size(); ++i) {
    if (out[i].numel() == 0 || !out[i].is_non_overlapping_and_dense()) continue;
    const char* const begin = static_cast<const char*>(out[i].const_data_ptr());
    spans.emplace_back(begin, begin + out[i].nbytes());
  }
  std::sort(spans.begin(), spans.end());
  for (size_t i = 1; i < spans.size(); ++i) require(spans[i - 1].second <= spans[i].first, "outputs overlap");
}

// The last of the lists is the output where writes is true. Returns the device.
inline c10::Device check_lists(c10::DeviceType type, std::initializer_list<const Tensors*> lists, bool writes,
                               const MaybeTensor& found_inf, std::initializer_list<const Number*> numbers) {
  const Tensors& first = **lists.begin();
  c10::Device device(type);
  if (!first.empty() && first[0].defined()) device = first[0].device();
  if (first.empty() && found_inf.has_value() && found_inf->defined()) device = found_inf->device();
  require(device.type() == type, "device");
  for (const Tensors* list : lists) require(list->size() == first.size(), "length");
  const Tensors* const out = writes ? *(lists.end() - 1) : nullptr;
  const bool recorded = writes && c10::GradMode::is_enabled();  // a flag of this thread
  for_each_index(first.size(), [&](size_t i) {
    for (const Tensors* list : lists) {
      const at::Tensor& t = (*list)[i];
      check_tensor(t, device);
      if (list == &first) continue;
      require(t.sizes() == first[i].sizes(), "shape");
      require((t.scalar_type() == at::kDouble) == (first[i].scalar_type() == at::kDouble), "float64");
    }
    if (out == nullptr) return;
    require(!recorded || !(*out)[i].requires_grad(), "requires grad");
    require(at::has_internal_overlap((*out)[i]) != at::MemOverlap::Yes, "overlap");
    for (const Tensors* list : lists) check_overlap((*list)[i], (*out)[i]);
  });
  if (writes) check_apart(*out);
  if (found_inf.has_value()) check_one(*found_inf, device, at::kFloat);
  for (const Number* number : numbers) check_number(*number, device);
  return device;
}

// ---------------------------------------------------------------------------------------------------------------------
// From a checked call to the loop

template <class T>
Scalar<T> scalar(const Number& number) {
  if (const double* value = std::get_if<double>(&number)) return {static_cast<T>(*value), nullptr, nullptr};
  const at::Tensor& t = std::get<at::Tensor>(number);
  if (t.scalar_type() == at::kDouble) return {T(0), nullptr, t.const_data_ptr<double>()};
  return {T(0), t.const_data_ptr<float>(), nullptr};
}

// Autograd and the callers that watch for edits learn of the write, as from any in-place op of torch.
inline void bump(const at::Tensor& t) {
  if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

// float64 tensors go through make(double()), the rest of the lists through make(float()).
template <class Loop, int N, class Make>
void launch(std::array<const Tensors*, N> in, const Tensors* out, const MaybeTensor& found_inf, double* squares,
            Make make) {
  Job<N> narrow{in, out, {}, nullptr, squares};
  if (found_inf.has_value()) {
    narrow.found_inf = found_inf->mutable_data_ptr<float>();
    bump(*found_inf);
  }
  Job<N> wide = narrow;
  for (size_t i = 0; i < in[0]->size(); ++i) {
    if (out != nullptr) {
      bump((*out)[i]);
      (*out)[i].mutable_data_ptr();  // a lazy copy becomes real here, not in several threads at once
    }
    const at::Tensor& t = (*in[0])[i];
    if (t.numel() != 0) (t.scalar_type() == at::kDouble ? wide : narrow).indices.push_back(static_cast<int64_t>(i));
  }
  if (!narrow.indices.empty()) Loop::template run<float>(narrow, make(float()));
  if (!wide.indices.empty()) Loop::template run<double>(wide, make(double()));
}

// {total, one norm a tensor}: float64 if any tensor is, else float32.
template <class Loop>
std::vector<at::Tensor> norms(const Tensors& tensors, const at::Tensor& squares) {
  at::ScalarType dtype = at::kFloat;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].scalar_type() == at::kDouble) dtype = at::kDouble;
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
  check_lists(Loop::device, {&src, &dst}, true, found_inf, {&factor});
  const double* number = std::get_if<double>(&factor);
  if (number != nullptr && *number == 1.0 && !found_inf.has_value()) {
    return launch<Loop, 1>({&src}, &dst, found_inf, nullptr, [](auto zero) { return Copy<decltype(zero)>{}; });
  }
  launch<Loop, 1>({&src}, &dst, found_inf, nullptr, [&](auto zero) {
    using T = decltype(zero);
    return Scale<T>{scalar<T>(factor), T(0)};
  });
}

template <class Loop>
void Ops<Loop>::unscale(const Tensors& grads, const Number& inv_scale, const MaybeTensor& found_inf) {
  scale(grads, grads, inv_scale, found_inf);
}

template <class Loop>
void Ops<Loop>::axpby(const Tensors& x, const Tensors& y, const Tensors& out, const Number& a, const Number& b,
                      const MaybeTensor& found_inf, bool watch_x, bool watch_y) {
  check_lists(Loop::device, {&x, &y, &out}, true, found_inf, {&a, &b});
  launch<Loop, 2>({&x, &y}, &out, found_inf, nullptr, [&](auto zero) {
    using T = decltype(zero);
    return Axpby<T>{scalar<T>(a), scalar<T>(b), watch_x, watch_y, T(0)};
  });
}

template <class Loop>
void Ops<Loop>::check_finite(const Tensors& tensors, const MaybeTensor& found_inf) {
  check_lists(Loop::device, {&tensors}, false, found_inf, {});
  launch<Loop, 1>({&tensors}, nullptr, found_inf, nullptr, [](auto zero) { return CheckFinite<decltype(zero)>{}; });
}

template <class Loop>
std::vector<at::Tensor> Ops<Loop>::l2norm(const Tensors& tensors) {
  const auto device = check_lists(Loop::device, {&tensors}, false, std::nullopt, {});
  const at::Tensor squares = make_squares(tensors, device);
  launch<Loop, 1>({&tensors}, nullptr, std::nullopt, squares.mutable_data_ptr<double>(),
                  [](auto zero) { return Norm<decltype(zero)>{}; });
  return norms<Loop>(tensors, squares);
}

template <class Loop>
std::vector<at::Tensor> Ops<Loop>::unscale_l2norm(const Tensors& grads, const Number& inv_scale,
                                                  const MaybeTensor& found_inf) {
  const auto device = check_lists(Loop::device, {&grads, &grads}, true, found_inf, {&inv_scale});
  const at::Tensor squares = make_squares(grads, device);
  launch<Loop, 1>({&grads}, &grads, found_inf, squares.mutable_data_ptr<double>(), [&](auto zero) {
    using T = decltype(zero);
    return ScaleNorm<T>{{scalar<T>(inv_scale), T(0)}};
  });
  return norms<Loop>(grads, squares);
}

template <class Loop>
void Ops<Loop>::adopt(const Tensors& params, const Tensors& masters) {
  for_each_index(masters.size(),
                 [&](size_t i) { require(masters[i].defined() && masters[i].scalar_type() == at::kFloat, "dtype"); });
  check_lists(Loop::device, {&params, &masters}, true, std::nullopt, {});
  launch<Loop, 2>({&params, &masters}, &masters, std::nullopt, nullptr,
                  [](auto zero) { return Adopt<decltype(zero)>{at::kFloat}; });
}

template <class Loop>
void Ops<Loop>::update_scale(const at::Tensor& scale, const at::Tensor& growth_tracker, const at::Tensor& found_inf,
                             double growth_factor, double backoff_factor, int growth_interval, double min_scale,
                             double max_scale, int hysteresis, const MaybeTensor& hysteresis_tracker) {
  require(scale.defined() && scale.device().type() == Loop::device, "device");
  check_one(scale, scale.device(), at::kFloat);
  check_one(growth_tracker, scale.device(), at::kInt);
  check_one(found_inf, scale.device(), at::kFloat);
  int* patience = nullptr;
  if (hysteresis_tracker.has_value()) {
    check_one(*hysteresis_tracker, scale.device(), at::kInt);
    patience = hysteresis_tracker->mutable_data_ptr<int>();
    bump(*hysteresis_tracker);
  }
  const c10::DeviceGuard guard(scale.device());
  Loop::once(UpdateScale{scale.mutable_data_ptr<float>(), growth_tracker.mutable_data_ptr<int>(), patience,
                         found_inf.const_data_ptr<float>(), growth_factor, backoff_factor, growth_interval, hysteresis,
                         static_cast<float>(min_scale), static_cast<float>(max_scale)});
  bump(scale);
  bump(growth_tracker);
}

}  // namespace amp_patch

// The functors: the computation of each op on one element, for the host and the device. T is float, or double for
// float64 tensors. V is T, or on the CPU a class of several T in a register with the operators that are used here
// (`Lanes` in cpu_registers.h): so there is one formula for both.
//
// A loop (cpu.cpp, cuda.cu) copies the functor, calls prepare() once per tensor, then for each element
//   value = f(x...)       computed in V; the loop rounds it to the output's dtype, once
//   f.bad(value, x...)    whether found_inf is set, if F::watches
//   f.term(stored)        a term of the sum, if F::reduces; stored is the value after rounding
// If F::writes is false, there is no output.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/macros/Macros.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <limits>

// Always inlined: without this, a vector register could be the argument of a real call, which is compiled for the
// baseline and not for the instruction set of the loop around it.
#define AMP_PATCH_ELEMENT C10_HOST_DEVICE C10_ALWAYS_INLINE

namespace amp_patch {

// x - x is 0 unless x is infinite or NaN. Unlike isfinite it becomes plain vector code on every compiler.
template <class V>
AMP_PATCH_ELEMENT auto is_finite(V x) {
  const V zero = x - x;
  return zero == zero;
}

template <class T>
AMP_PATCH_ELEMENT T where(bool condition, T a, T b) {
  return condition ? a : b;
}

// Tells whether x, rounded to a dtype with this overflow_limit, is finite. False for NaN.
template <class V, class T>
AMP_PATCH_ELEMENT auto is_within(V x, T limit) {
  return (x < limit) & (-x < limit);
}

// The smallest magnitude that rounds to infinity: the largest finite value plus half a unit in its last place.
template <class T>
C10_HOST_DEVICE inline T overflow_limit(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return T(65520);
    case c10::ScalarType::BFloat16:
      return T(0x1.FFp127);
    default:
      return std::numeric_limits<T>::infinity();
  }
}

template <class T>
C10_HOST_DEVICE inline T round_to(c10::ScalarType dtype, T x) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return static_cast<T>(static_cast<float>(c10::Half(static_cast<float>(x))));
    case c10::ScalarType::BFloat16:
      return static_cast<T>(static_cast<float>(c10::BFloat16(static_cast<float>(x))));
    default:
      return x;
  }
}

// A factor: a number on the host, or one in the device's memory, read there so that the host does not sync.
template <class T>
struct Scalar {
  T value;
  const float* f32;
  const double* f64;
  C10_HOST_DEVICE void load() {
    if (f32 != nullptr) value = static_cast<T>(*f32);
    if (f64 != nullptr) value = static_cast<T>(*f64);
  }
};

// out = factor * x. A non-finite x makes a non-finite product, so only the product is watched.
template <class T>
struct Scale {
  static constexpr bool writes = true, watches = true, reduces = false;
  Scalar<T> factor;
  T limit;
  C10_HOST_DEVICE void prepare(c10::ScalarType, c10::ScalarType out) {
    factor.load();
    limit = overflow_limit<T>(out);
  }
  template <class V>
  AMP_PATCH_ELEMENT V operator()(V x) const {
    return x * factor.value;
  }
  template <class V>
  AMP_PATCH_ELEMENT auto bad(V value, V) const {
    return !is_within(value, limit);
  }
};

// out = x: the cast, and the copy.
template <class T>
struct Copy {
  static constexpr bool writes = true, watches = false, reduces = false;
  C10_HOST_DEVICE void prepare(c10::ScalarType, c10::ScalarType) {}
  template <class V>
  AMP_PATCH_ELEMENT V operator()(V x) const {
    return x;
  }
};

// out = a * x + b * y, each product rounded. A non-finite result is bad unless it comes from a side that is not
// watched: y may be an earlier gradient, checked when it was made.
template <class T>
struct Axpby {
  static constexpr bool writes = true, watches = true, reduces = false;
  Scalar<T> a, b;
  bool watch_x, watch_y;
  T limit;
  C10_HOST_DEVICE void prepare(c10::ScalarType, c10::ScalarType out) {
    a.load();
    b.load();
    limit = overflow_limit<T>(out);
  }
  template <class V>
  AMP_PATCH_ELEMENT V operator()(V x, V y) const {
#ifdef __CUDA_ARCH__
    return add(multiply(a.value, x), multiply(b.value, y));  // never one fused multiply-add, whatever the flags
#else
    return a.value * x + b.value * y;  // not fused: setup.py gives -ffp-contract=off
#endif
  }
  template <class V>
  AMP_PATCH_ELEMENT auto bad(V value, V x, V y) const {
    const auto x_bad = !is_finite(x), y_bad = !is_finite(y);
    const auto raised = (x_bad & watch_x) | (y_bad & watch_y);
    const auto excused = (x_bad & !watch_x) | (y_bad & !watch_y);
    return (raised | !excused) & !is_within(value, limit);
  }
#ifdef __CUDACC__
 private:
  static __device__ float multiply(float p, float q) { return __fmul_rn(p, q); }
  static __device__ double multiply(double p, double q) { return __dmul_rn(p, q); }
  static __device__ float add(float p, float q) { return __fadd_rn(p, q); }
  static __device__ double add(double p, double q) { return __dadd_rn(p, q); }
#endif
};

// Checks that factor * x is finite. Writes nothing.
template <class T>
struct CheckFinite {
  static constexpr bool writes = false, watches = true, reduces = false;
  Scalar<T> factor;
  C10_HOST_DEVICE void prepare(c10::ScalarType, c10::ScalarType) { factor.load(); }
  template <class V>
  AMP_PATCH_ELEMENT V operator()(V x) const {
    return x * factor.value;
  }
  template <class V>
  AMP_PATCH_ELEMENT auto bad(V value, V) const {
    return !is_finite(value);
  }
};

// The sum of the squares of factor * x, each product rounded.
template <class T>
struct Norm {
  static constexpr bool writes = false, watches = false, reduces = true;
  Scalar<T> factor;
  C10_HOST_DEVICE void prepare(c10::ScalarType, c10::ScalarType) { factor.load(); }
  template <class V>
  AMP_PATCH_ELEMENT V operator()(V x) const {
    return x * factor.value;
  }
  template <class V>
  AMP_PATCH_ELEMENT V term(V stored) const {
    return stored * stored;
  }
};

// Norm, which watches the products too.
template <class T>
struct CheckedNorm : Norm<T> {
  static constexpr bool watches = true;
  template <class V>
  AMP_PATCH_ELEMENT auto bad(V value, V) const {
    return !is_finite(value);
  }
};

// out = factor * x, and the sum of the squares of the stored values, in one pass.
template <class T>
struct ScaleNorm : Scale<T> {
  static constexpr bool reduces = true;
  template <class V>
  AMP_PATCH_ELEMENT V term(V stored) const {
    return stored * stored;
  }
};

// out = param if user code has changed the parameter (the master no longer rounds to it; a NaN always counts as
// changed), else master. `out` is the master's own memory, so a loop need not write if changes() is false.
template <class T>
struct Adopt {
  static constexpr bool writes = true, watches = false, reduces = false;
  c10::ScalarType low;
  C10_HOST_DEVICE void prepare(c10::ScalarType param, c10::ScalarType) { low = param; }
  template <class V>
  AMP_PATCH_ELEMENT auto changes(V param, V master) const {
    return !(round_to(low, master) == param);
  }
  template <class V>
  AMP_PATCH_ELEMENT V operator()(V param, V master) const {
    return where(changes(param, master), param, master);
  }
};

// Updates the loss scale and its growth counter by the overflow flags. Runs once, not per element; products are in
// FP64, rounded once.
struct UpdateScale {
  static constexpr float SMALLEST_SCALE = 0x1p-127f;  // the smallest power of two whose inverse is finite
  float* scale;
  int* growth_tracker;
  int* hysteresis_tracker;  // null: the scale backs off at every overflow
  const float* found_inf;
  float* earlier_inf;  // counts as found_inf does, and is set to 0; null: no such flag. It may be found_inf
  double growth_factor, backoff_factor;
  int growth_interval, hysteresis;
  float min_scale, max_scale;

  C10_HOST_DEVICE void operator()() const {
    bool overflow = *found_inf != 0.0f;  // a NaN counts as an overflow
    if (earlier_inf != nullptr) {
      overflow |= *earlier_inf != 0.0f;
      *earlier_inf = 0.0f;
    }
    int patience = 0;
    if (hysteresis_tracker != nullptr) {
      patience = overflow ? *hysteresis_tracker - 1 : hysteresis;
      *hysteresis_tracker = patience;
    }
    float next = *scale;
    int clean_steps = overflow ? 0 : *growth_tracker + 1;
    if (overflow) {
      const double lower = next * backoff_factor;
      if (patience <= 0) next = lower < SMALLEST_SCALE ? SMALLEST_SCALE : static_cast<float>(lower);
    } else if (clean_steps >= growth_interval) {
      const float higher = static_cast<float>(next * growth_factor);
      if (is_finite(higher)) next = higher;
      clean_steps = 0;
    }
    *growth_tracker = clean_steps;
    next = next < min_scale ? min_scale : next;
    *scale = next > max_scale ? max_scale : next;
  }
};

}  // namespace amp_patch

// The optimizers' formulas: a step on one element, for the host and the device. Written once for float and, on the CPU,
// for registers of floats (`Lanes`, with the functions below for them in step_vectors.h).
//
// Every function below rounds once, so no contraction by the compiler changes a result. The results have the same bits
// as those of the fused CPU kernels in torch's wheels, because the order of operations and the fused multiply-adds are
// the same. Those kernels use vectors of eight, and scalar code (kTail) for the last n % 8 elements of a tensor. In
// that code the compiler has fused the other product of a sum.
//
// A functor has
//   step<kTail>(rates, grad, param, states)  one element: FP32 gradient, still scaled; param and states are changed
//   kStates                                  the number of states of a parameter
// `rates` belong to one tensor, since tensors may differ in their count of steps.
#pragma once

#include <c10/core/ScalarType.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "functors.h"

namespace amp_patch {

// ---------------------------------------------------------------------------------------------------------------------
// Arithmetic

AMP_PATCH_ELEMENT float fill(float, float value) { return value; }  // `value` in the type of the first argument
#ifdef __CUDA_ARCH__
AMP_PATCH_ELEMENT float plus(float a, float b) { return __fadd_rn(a, b); }
AMP_PATCH_ELEMENT float minus(float a, float b) { return __fsub_rn(a, b); }
AMP_PATCH_ELEMENT float times(float a, float b) { return __fmul_rn(a, b); }
AMP_PATCH_ELEMENT float over(float a, float b) { return __fdiv_rn(a, b); }
AMP_PATCH_ELEMENT float root(float a) { return __fsqrt_rn(a); }
AMP_PATCH_ELEMENT float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
#else
AMP_PATCH_ELEMENT float plus(float a, float b) { return a + b; }
AMP_PATCH_ELEMENT float minus(float a, float b) { return a - b; }
AMP_PATCH_ELEMENT float times(float a, float b) { return a * b; }
AMP_PATCH_ELEMENT float over(float a, float b) { return a / b; }
AMP_PATCH_ELEMENT float root(float a) { return std::sqrt(a); }
AMP_PATCH_ELEMENT float fused(float a, float b, float c) { return std::fma(a, b, c); }  // a * b + c, rounded once
#endif
AMP_PATCH_ELEMENT bool less(float a, float b) { return a < b; }
AMP_PATCH_ELEMENT bool is_nan(float a) { return !(a == a); }

// ---------------------------------------------------------------------------------------------------------------------
// Split masters: an FP32 number as a BF16 weight and the low 16 bits, signed. The weight is the high 16 bits, plus one
// if the low half is negative, so that `weight << 16` and the half add up to the number's bits. A NaN, whose carry
// might run into an infinity or past the sign, becomes the one NaN whose low half is 0. A number below 2^-134, half of
// the smallest BF16 number, has a weight of 0 and is joined as 0.

AMP_PATCH_ELEMENT uint32_t bits_of(float x) {
  uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
AMP_PATCH_ELEMENT float from_bits(uint32_t bits) {
  float x = 0;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

AMP_PATCH_ELEMENT void split(float master, c10::BFloat16& weight, int16_t& half) {
  const uint32_t bits = is_nan(master) ? 0x7FC00000u : bits_of(master);
  weight = c10::BFloat16(static_cast<uint16_t>((bits + 0x8000u) >> 16), c10::BFloat16::from_bits());
  half = static_cast<int16_t>(bits & 0xFFFFu);
}

// A weight of 0 is joined as 0, with any half: user code may have written it (pruning), and a tiny master looks the
// same. The half is also ignored if the weight is a NaN, or an infinity with a positive half: no number is split into
// such a pair, whose sum is a NaN. The test for 0 compares bits, because a comparison of floats treats subnormal
// numbers as 0 if a thread has called set_flush_denormal.
AMP_PATCH_ELEMENT float join(c10::BFloat16 weight, int16_t half) {
  const uint32_t high = static_cast<uint32_t>(weight.x) << 16;
  const float master = from_bits(high + static_cast<uint32_t>(static_cast<int32_t>(half)));
  return high << 1 == 0 || is_nan(master) ? from_bits(high) : master;
}

// Stochastic rounding: an FP32 number becomes the BF16 number below or above it, chosen by 16 random bits. The
// probability of each falls linearly with its distance, so the mean is the number itself. A number that BF16 has is
// not changed. A finite number never becomes an infinity: beyond the largest BF16 number it is truncated.
constexpr uint32_t kLargestBFloat16 = 0x7F7F0000u;

AMP_PATCH_ELEMENT c10::BFloat16 round_stochastically(float x, uint16_t random) {
  const uint32_t bits = is_nan(x) ? 0x7FC00000u : bits_of(x);
  const uint32_t up = (bits & 0x7FFFFFFFu) < kLargestBFloat16 ? random : 0u;
  return c10::BFloat16(static_cast<uint16_t>((bits + up) >> 16), c10::BFloat16::from_bits());
}

// The gradient (FP32) times the inverse loss scale, times the clipping coefficient; negated to maximize.
struct Unscale {
  float factors[2];  // 1 for no factor: the product is exact

  template <class V>
  AMP_PATCH_ELEMENT V operator()(V grad) const {
    return times(times(grad, fill(grad, factors[0])), fill(grad, factors[1]));
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Adam and AdamW

struct AdamRates {
  float step_size;   // -lr / (1 - beta1 ** step)
  float correction;  // sqrt(1 - beta2 ** step)
  float decay;       // 1 - lr * weight_decay if decoupled, else 1
};

// The numbers from which a tensor's rates are computed, in FP64 as in torch.
struct AdamNumbers {
  double beta1, beta2, weight_decay;
  bool decoupled, corrects;

  // `step`: the number of this step, from 1.
  C10_HOST_DEVICE AdamRates rates(double lr, double step) const {
    const double first = corrects ? 1 - std::pow(beta1, step) : 1, second = corrects ? 1 - std::pow(beta2, step) : 1;
    return {static_cast<float>(-(lr / first)), static_cast<float>(std::sqrt(second)),
            static_cast<float>(decoupled ? 1 - lr * weight_decay : 1)};
  }
};

// states: exp_avg, exp_avg_sq and, with kAmsgrad, max_exp_avg_sq.
template <bool kAmsgrad>
struct Adam {
  using Rates = AdamRates;
  static constexpr int kStates = kAmsgrad ? 3 : 2;
  Unscale unscale;
  float weight_decay;  // Adam's, added to the gradient; 0 for AdamW
  float weight1;       // 1 - beta1
  float beta2, weight2, eps;

  template <bool kTail, class V>
  AMP_PATCH_ELEMENT void step(const Rates& rates, V grad, V& param, V* states) const {
    V g = unscale(grad), &m = states[0], &v = states[1];
    param = times(param, fill(g, rates.decay));
    if (weight_decay != 0) g = fused(param, fill(g, weight_decay), g);
    if (weight1 < 0.5f) {
      m = fused(fill(g, weight1), minus(g, m), m);
    } else {
      m = fused(fill(g, weight1 - 1), minus(g, m), g);
    }
    const V weighted = times(fill(g, weight2), g);
    if constexpr (kTail) {
      v = fused(v, fill(g, beta2), times(weighted, g));
    } else {
      v = fused(weighted, g, times(v, fill(g, beta2)));
    }
    V square = v;
    if constexpr (kAmsgrad) {
      V& most = states[2];
      if constexpr (kTail) {
        most = where(less(most, v), v, most);
      } else {
        most = where(less(most, v) | is_nan(v), v, most);
      }
      square = most;
    }
    const V denominator = plus(over(root(square), fill(g, rates.correction)), fill(g, eps));
    param = plus(param, over(times(fill(g, rates.step_size), m), denominator));
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// SGD

struct SgdRates {
  float step_size;  // -lr
};

// states: momentum_buffer, with kMomentum.
template <bool kMomentum>
struct Sgd {
  using Rates = SgdRates;
  static constexpr int kStates = kMomentum ? 1 : 0;
  Unscale unscale;
  float weight_decay, momentum;
  float weight;  // 1 - dampening
  bool nesterov, first_run;

  template <bool kTail, class V>
  AMP_PATCH_ELEMENT void step(const Rates& rates, V grad, V& param, V* states) const {
    V g = unscale(grad);
    if (weight_decay != 0) g = fused(param, fill(g, weight_decay), g);
    if constexpr (kMomentum) {
      V& m = states[0];
      const V rate = fill(g, momentum);
      if (first_run) {
        m = g;
      } else if constexpr (kTail) {
        m = fused(m, rate, times(g, fill(g, weight)));
      } else {
        m = fused(g, fill(g, weight), times(m, rate));
      }
      g = nesterov ? fused(m, rate, g) : m;
    }
    param = fused(g, fill(g, rates.step_size), param);
  }
};

}  // namespace amp_patch

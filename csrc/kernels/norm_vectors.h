// The CPU's innermost loop of a layer norm's gradients, for one instruction set. norm_sums.cpp includes this file once
// for each set.

#include "cpu_registers.h"

struct NormSums {
  // For each of `rows` rows of n elements: weight += grad * (x - mean) * deviation, bias += grad, in FP32.
  template <class Low>
  static void add(int64_t rows, int64_t n, const Low* grad, const Low* x, const float* mean, const float* deviation,
                  float* weight, float* bias) {
    for (int64_t row = 0; row < rows; ++row, grad += n, x += n) {
      const float m = mean[row], d = deviation[row];
      int64_t i = 0;
#if AMP_PATCH_WIDTH > 1
      const Lanes means{broadcast(m)}, deviations{broadcast(d)};
      for (; i + 2 * AMP_PATCH_WIDTH <= n; i += 2 * AMP_PATCH_WIDTH) {
        const Pair g = fetch(grad + i), v = fetch(x + i), w = fetch(weight + i), b = fetch(bias + i);
        put<false>(weight + i, Pair{w.low + g.low * ((v.low - means) * deviations),
                                    w.high + g.high * ((v.high - means) * deviations)});
        put<false>(bias + i, Pair{b.low + g.low, b.high + g.high});
      }
#endif
      for (; i < n; ++i) {
        const float g = static_cast<float>(grad[i]);
        weight[i] += g * ((static_cast<float>(x[i]) - m) * d);
        bias[i] += g;
      }
    }
  }
};

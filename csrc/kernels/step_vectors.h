// The CPU's innermost loop of an optimizer's step, for one instruction set. steps_cpu.cpp includes this file once for
// each set, as cpu_registers.h wants it; the sets have FMA. Every set gives the same bits.

#include "cpu_registers.h"

#if AMP_PATCH_WIDTH > 1

#if AMP_PATCH_WIDTH == 16
inline Lanes root(Lanes a) { return {_mm512_sqrt_ps(a.v)}; }
inline Lanes fused(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline bool differ(Integers a, Integers b) { return _mm512_cmpneq_epi32_mask(a, b) != 0; }
#else
inline Lanes root(Lanes a) { return {_mm256_sqrt_ps(a.v)}; }
inline Lanes fused(Lanes a, Lanes b, Lanes c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline bool differ(Integers a, Integers b) { return _mm256_movemask_epi8(_mm256_cmpeq_epi32(a, b)) != -1; }
#endif

inline Lanes fill(Lanes, float value) { return {broadcast(value)}; }
inline Lanes plus(Lanes a, Lanes b) { return a + b; }
inline Lanes minus(Lanes a, Lanes b) { return a - b; }
inline Lanes times(Lanes a, Lanes b) { return a * b; }
inline Lanes over(Lanes a, Lanes b) { return {a.v / b.v}; }
inline Mask less(Lanes a, Lanes b) { return compare<_CMP_LT_OQ>(a.v, b.v); }
inline Mask is_nan(Lanes a) { return !(a == a); }

#endif

struct Set {
  // One step of `f` on n elements; where n is no multiple of 8, they are the last of their tensor. Low is the dtype of
  // the published weight `low`, or float where there is none.
  template <class F, class Grad, class Low>
  __attribute__((flatten)) static void step(const F& functor, const typename F::Rates& tensor_rates, int64_t n,
                                            const Grad* grad, float* param, Low* low, float* const* states) {
    const F f = functor;  // by value: else, for all the compiler knows, a store might change them
    const typename F::Rates rates = tensor_rates;
    constexpr int S = F::kStates;
    float* state[S + 1] = {};
    for (int s = 0; s < S; ++s) state[s] = states[s];
    int64_t i = 0;
#if AMP_PATCH_WIDTH > 1
    for (; i + 2 * AMP_PATCH_WIDTH <= n; i += 2 * AMP_PATCH_WIDTH) {
      const Pair g = fetch(grad + i);
      Pair p = adopted(param + i, low + i);
      Lanes first[S + 1], second[S + 1];
      for (int s = 0; s < S; ++s) {
        const Pair both = fetch(state[s] + i);
        first[s] = both.low;
        second[s] = both.high;
      }
      f.template step<false>(rates, g.low, p.low, first);
      f.template step<false>(rates, g.high, p.high, second);
      put<false>(param + i, p);
      if constexpr (!std::is_same_v<Low, float>) put<false>(low + i, p);
      for (int s = 0; s < S; ++s) put<false>(state[s] + i, Pair{first[s], second[s]});
    }
#endif
    const auto one = [&](auto tail) {
      float p = param[i], own[S + 1];
      if constexpr (!std::is_same_v<Low, float>) {
        const auto weight = static_cast<float>(low[i]);
        if (!(static_cast<float>(static_cast<Low>(p)) == weight)) p = weight;
      }
      for (int s = 0; s < S; ++s) own[s] = state[s][i];
      f.template step<decltype(tail)::value>(rates, static_cast<float>(grad[i]), p, own);
      param[i] = p;
      if constexpr (!std::is_same_v<Low, float>) low[i] = static_cast<Low>(p);
      for (int s = 0; s < S; ++s) state[s][i] = own[s];
    };
    for (; i < n - n % 8; ++i) one(std::false_type());
    for (; i < n; ++i) one(std::true_type());
  }

#if AMP_PATCH_WIDTH > 1
 private:
  // The masters, which take the weight's value where that was edited: where it is no longer the master, rounded.
  template <class Low>
  static Pair adopted(const float* param, const Low* low) {
    Pair p = fetch(param);
    if constexpr (!std::is_same_v<Low, float>) {
      const Integers weights = at<Integers>(low);
      const Integers published = pack(p, Low());
      if (__builtin_expect(differ(published, weights), false)) {
        const Pair now = unpack(weights, Low()), before = unpack(published, Low());
        p.low = where(before.low == now.low, p.low, now.low);
        p.high = where(before.high == now.high, p.high, now.high);
      }
    }
    return p;
  }
#endif
};

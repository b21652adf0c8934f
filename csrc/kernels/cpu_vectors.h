// The CPU's innermost loop, for one instruction set. cpu.cpp includes this file once for each set (so there is no
// `#pragma once`), after cpu_registers.h. Every set gives the same bits: no multiplication and addition are fused, and
// a sum has kLanes lanes for any width.

#include "cpu_registers.h"

#if AMP_PATCH_WIDTH > 1

// Prefetches kLanes elements, kReadAhead bytes after p, into the L2 cache. The address may be past the end of a tensor,
// because a prefetch never faults. The processor's own prefetcher stops at the end of a page; without this, a loop that
// only reads waits for memory.
template <class Element>
void prefetch_ahead(const Element* p) {
  constexpr size_t kLine = 64;
  const uintptr_t row = reinterpret_cast<uintptr_t>(p) + kReadAhead;
  for (size_t k = 0; k < kLanes * sizeof(Element); k += kLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(row + k), 0, 2);
  }
}

// The last m elements of a row, filled up to kLanes with repetitions of the last one.
template <class Element>
struct Padded {
  alignas(64) Element elements[kLanes];
  Padded(const Element* from, int64_t m) {
    std::memcpy(static_cast<void*>(elements), from, m * sizeof(Element));
    for (int64_t k = m; k < kLanes; ++k) elements[k] = from[m - 1];
  }
};

#endif

struct Set {
  // out[i] = f(in[i]...) for n elements. kStream: `out` is written past the caches.
  template <bool kStream, class T, class Functor, class Out, class... In>
  static Result map(const Functor& f, int64_t n, Out* out, const In*... in) {
    Loop<kStream, T, Functor> loop{f};
    loop.run(n, out, in...);
    return loop.result();
  }

  // For each of `rows` rows of n elements: weight += grad * (x - mean) * deviation, bias += grad, in FP32.
  template <class Low>
  static void add_norm_rows(int64_t rows, int64_t n, const Low* grad, const Low* x, const float* mean,
                            const float* deviation, float* weight, float* bias) {
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

 private:
  template <bool kStream, class T, class Functor>
  struct Loop {
    const Functor f;  // by value: through a reference the compiler would reload its members after each store to out
    bool bad = false;
    T sums[kLanes] = {};
    static constexpr bool kSeldom = std::is_same_v<Functor, Adopt<T>>;  // stores only registers that change

    template <class Out, class... In>
    void one(int64_t lane, Out* out, const In*... in) {
      T value = f(static_cast<T>(*in)...);
      if constexpr (Functor::watches) bad |= f.bad(value, static_cast<T>(*in)...);
      if constexpr (Functor::writes) *out = static_cast<Out>(value);
      if constexpr (Functor::writes && Functor::reduces) value = static_cast<T>(*out);
      if constexpr (Functor::reduces) sums[lane] += f.term(value);
    }

#if AMP_PATCH_WIDTH > 1
    template <class Out, class... In>
    __attribute__((flatten)) void run(int64_t n, Out* out, const In*... in) {
      constexpr int64_t kWidth = AMP_PATCH_WIDTH;
      Lanes totals[kLanes / kWidth] = {};
      Mask mask{};
      const auto step = [&](Out* to, const In*... from) {
        for (int64_t k = 0; k < kLanes; k += 2 * kWidth) {
          if constexpr (kSeldom) {
            if (!any(f.changes(fetch(from + k).low...) | f.changes(fetch(from + k).high...))) continue;
          }
          Pair value{f(fetch(from + k).low...), f(fetch(from + k).high...)};
          if constexpr (Functor::watches) {
            mask = mask | f.bad(value.low, fetch(from + k).low...) | f.bad(value.high, fetch(from + k).high...);
          }
          if constexpr (Functor::writes) put<kStream>(to + k, value);
          if constexpr (Functor::writes && Functor::reduces) value = rounded<Out>(value);
          if constexpr (Functor::reduces) {
            Lanes *const low = totals + k / kWidth, *const high = low + 1;
            *low = *low + f.term(value.low);
            *high = *high + f.term(value.high);
          }
        }
      };

      int64_t i = 0;
      if constexpr (kStream) {
        static_assert(!Functor::reduces, "the elements before the first aligned one would move the lanes");
        for (; i < n && reinterpret_cast<uintptr_t>(out + i) % sizeof(Register) != 0; ++i) one(0, out + i, (in + i)...);
      }
      if constexpr (!Functor::writes) {
        const bool is_long = ((n * static_cast<int64_t>(sizeof(In)) >= 4 * kReadAhead) && ...);
        for (; is_long && i + kLanes <= n; i += kLanes) {
          (prefetch_ahead(in + i), ...);
          step(out + i, (in + i)...);
        }
      }
      for (; i + kLanes <= n; i += kLanes) step(out + i, (in + i)...);
      if constexpr (Functor::reduces) {
        std::memcpy(sums, totals, sizeof(sums));
        for (int64_t lane = 0; i < n; ++i, ++lane) one(lane, out + i, (in + i)...);
      } else if (i < n) {
        alignas(64) Out to[kLanes];
        if constexpr (kSeldom) std::memcpy(static_cast<void*>(to), out + i, (n - i) * sizeof(Out));
        step(to, Padded<In>(in + i, n - i).elements...);
        if constexpr (Functor::writes) std::memcpy(static_cast<void*>(out + i), to, (n - i) * sizeof(Out));
      }
      if constexpr (kStream) _mm_sfence();
      if constexpr (Functor::watches) bad |= any(mask);
    }
#else
    template <class Out, class... In>
    void run(int64_t n, Out* out, const In*... in) {
      int64_t i = 0;
      for (; i + kLanes <= n; i += kLanes) {
        for (int64_t lane = 0; lane < kLanes; ++lane) one(lane, out + i + lane, (in + i + lane)...);
      }
      for (int64_t lane = 0; i < n; ++i, ++lane) one(lane, out + i, (in + i)...);
    }
#endif

    Result result() const {
      if constexpr (!Functor::reduces) return {bad, 0};
      double tree[kLanes];  // a tree of additions in FP64, always in this order
      for (int64_t k = 0; k < kLanes; ++k) tree[k] = sums[k];
      for (int64_t half = kLanes / 2; half > 0; half /= 2) {
        for (int64_t k = 0; k < half; ++k) tree[k] += tree[k + half];
      }
      return {bad, tree[0]};
    }
  };
};

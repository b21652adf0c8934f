// The CPU's innermost loop of an optimizer's step, for one instruction set. steps_cpu.cpp includes this file once for
// each set, after cpu_registers.h; the sets have FMA. Every set gives the same bits.

#include "cpu_registers.h"

#if AMP_PATCH_WIDTH > 1

#if AMP_PATCH_WIDTH == 16
inline Lanes root(Lanes a) { return {_mm512_sqrt_ps(a.v)}; }
inline Lanes fused(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline bool differ(Integers a, Integers b) { return _mm512_cmpneq_epi32_mask(a, b) != 0; }
inline Integers sum(Integers a, Integers b) { return _mm512_add_epi32(a, b); }
// `half`, or 0 if `high` has the bits of 0 or -0.
inline Integers unless_zero(Integers high, Integers half) {
  return _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(high, _mm512_set1_epi32(0x7FFFFFFF)), half);
}
// The 16-bit elements in one half of `v`, each extended to 32 bits: with its sign, or with zeros.
inline Integers signed_from(Integers v, int which) { return _mm512_cvtepi16_epi32(half_of(v, which)); }
inline Integers unsigned_from(Integers v, int which) { return _mm512_cvtepu16_epi32(half_of(v, which)); }
// `v`, or 0 if the bits of `number`, without its sign, are at least `bound`.
inline Integers if_below(Integers number, int bound, Integers v) {
  const Integers size = _mm512_and_si512(number, _mm512_set1_epi32(0x7FFFFFFF));
  return _mm512_maskz_mov_epi32(_mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(bound)), v);
}
// Products of 32-bit elements by b, in two registers. product: 64-bit products of the elements at even places. odd_of:
// the elements at odd places, moved to even places for `product`. zipped: the low words of both results in the order of
// the elements.
inline Integers product(Integers even, uint32_t b) {
  return _mm512_mul_epu32(even, _mm512_set1_epi32(static_cast<int>(b)));
}
inline Integers odd_of(Integers a) { return _mm512_srli_epi64(a, 32); }
inline Integers zipped(Integers even, Integers odd) {
  return _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
}
inline Integers exclusive(Integers a, Integers b, uint32_t c) {
  return _mm512_xor_si512(_mm512_xor_si512(a, b), _mm512_set1_epi32(static_cast<int>(c)));
}
// Counters: `first` and the numbers after it, in an order for which `transpose` puts out their words counter by
// counter.
inline Integers counted(uint32_t first) {
  return add(_mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0), static_cast<int>(first));
}
inline Integers fill_integers(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
// w[i] has word i of the random bits of each counter. Afterwards the registers have the four words of a counter side by
// side.
inline void transpose(Integers (&w)[4]) {
  const Integers a = _mm512_unpacklo_epi32(w[0], w[1]), b = _mm512_unpackhi_epi32(w[0], w[1]);
  const Integers c = _mm512_unpacklo_epi32(w[2], w[3]), d = _mm512_unpackhi_epi32(w[2], w[3]);
  w[0] = _mm512_unpacklo_epi64(a, c);
  w[1] = _mm512_unpackhi_epi64(a, c);
  w[2] = _mm512_unpacklo_epi64(b, d);
  w[3] = _mm512_unpackhi_epi64(b, d);
}
inline Integers low_halves(Integers a, Integers b) { return join(_mm512_cvtepi32_epi16(a), _mm512_cvtepi32_epi16(b)); }
#else
inline Lanes root(Lanes a) { return {_mm256_sqrt_ps(a.v)}; }
inline Lanes fused(Lanes a, Lanes b, Lanes c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline bool differ(Integers a, Integers b) { return _mm256_movemask_epi8(_mm256_cmpeq_epi32(a, b)) != -1; }
inline Integers sum(Integers a, Integers b) { return _mm256_add_epi32(a, b); }
inline Integers unless_zero(Integers high, Integers half) {
  return _mm256_andnot_si256(_mm256_cmpeq_epi32(_mm256_slli_epi32(high, 1), _mm256_setzero_si256()), half);
}
inline Integers signed_from(Integers v, int which) { return _mm256_cvtepi16_epi32(half_of(v, which)); }
inline Integers unsigned_from(Integers v, int which) { return _mm256_cvtepu16_epi32(half_of(v, which)); }
inline Integers if_below(Integers number, int bound, Integers v) {
  const Integers size = _mm256_and_si256(number, _mm256_set1_epi32(0x7FFFFFFF));
  return _mm256_and_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(bound), size), v);
}
inline Integers product(Integers even, uint32_t b) {
  return _mm256_mul_epu32(even, _mm256_set1_epi32(static_cast<int>(b)));
}
inline Integers odd_of(Integers a) { return _mm256_srli_epi64(a, 32); }
inline Integers zipped(Integers even, Integers odd) {
  return _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
}
inline Integers exclusive(Integers a, Integers b, uint32_t c) {
  return _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_set1_epi32(static_cast<int>(c)));
}
inline Integers counted(uint32_t first) {
  return add(_mm256_set_epi32(7, 5, 3, 1, 6, 4, 2, 0), static_cast<int>(first));
}
inline Integers fill_integers(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
inline void transpose(Integers (&w)[4]) {
  const Integers a = _mm256_unpacklo_epi32(w[0], w[1]), b = _mm256_unpackhi_epi32(w[0], w[1]);
  const Integers c = _mm256_unpacklo_epi32(w[2], w[3]), d = _mm256_unpackhi_epi32(w[2], w[3]);
  w[0] = _mm256_unpacklo_epi64(a, c);
  w[1] = _mm256_unpackhi_epi64(a, c);
  w[2] = _mm256_unpacklo_epi64(b, d);
  w[3] = _mm256_unpackhi_epi64(b, d);
}
inline Integers low_halves(Integers a, Integers b) {
  const Integers low = _mm256_set1_epi32(0xFFFF);
  const Integers mixed = _mm256_packus_epi32(_mm256_and_si256(a, low), _mm256_and_si256(b, low));
  return _mm256_permute4x64_epi64(mixed, 0xD8);
}
#endif

inline Lanes fill(Lanes, float value) { return {broadcast(value)}; }
inline Lanes plus(Lanes a, Lanes b) { return a + b; }
inline Lanes minus(Lanes a, Lanes b) { return a - b; }
inline Lanes times(Lanes a, Lanes b) { return a * b; }
inline Lanes over(Lanes a, Lanes b) { return {a.v / b.v}; }
inline Mask less(Lanes a, Lanes b) { return compare<_CMP_LT_OQ>(a.v, b.v); }
inline Mask is_nan(Lanes a) { return !(a == a); }
// The FP32 bits of `p`, ready to be split; every NaN becomes the NaN whose low 16 bits are 0.
inline Integers numbers(Lanes p) {
  const Lanes nan{same_bits<Register>(add(Integers(), 0x7FC00000))};
  return same_bits<Integers>(where(is_nan(p), nan, p).v);
}

#endif

#include "code_vectors.h"

// The loops of one instruction set, for steps_cpu.cpp.
struct Loops {
  using Codes = CodesOfState;
  // The storage of masters: whole, without or with a low-precision weight, or split. Each form reads and writes one
  // element, or a pair of registers.
  struct Whole {
    float* params;

    float read(int64_t i) const { return params[i]; }
    void write(int64_t i, float p) const { params[i] = p; }
#if AMP_PATCH_WIDTH > 1
    Pair read_pair(int64_t i) const { return fetch(params + i); }
    void write_pair(int64_t i, Pair p) const { put<false>(params + i, p); }
#endif
  };

  template <class Low>
  struct Published {
    float* params;
    Low* weights;

    // If the weight differs from the rounded master, user code has edited the weight, and the master takes its value.
    float read(int64_t i) const {
      const auto weight = static_cast<float>(weights[i]);
      return static_cast<float>(static_cast<Low>(params[i])) == weight ? params[i] : weight;
    }
    void write(int64_t i, float p) const {
      params[i] = p;
      weights[i] = static_cast<Low>(p);
    }
#if AMP_PATCH_WIDTH > 1
    Pair read_pair(int64_t i) const {
      Pair p = fetch(params + i);
      const Integers now = at<Integers>(weights + i), before = pack(p, Low());
      if (__builtin_expect(differ(before, now), false)) {
        const Pair edited = unpack(now, Low()), published = unpack(before, Low());
        p.low = where(published.low == edited.low, p.low, edited.low);
        p.high = where(published.high == edited.high, p.high, edited.high);
      }
      return p;
    }
    void write_pair(int64_t i, Pair p) const {
      put<false>(params + i, p);
      put<false>(weights + i, p);
    }
#endif
  };

  struct Split {
    int16_t* halves;
    c10::BFloat16* weights;

    float read(int64_t i) const { return amp_patch::join(weights[i], halves[i]); }
    void write(int64_t i, float p) const { split(p, weights[i], halves[i]); }
#if AMP_PATCH_WIDTH > 1
    Pair read_pair(int64_t i) const {
      const Integers weight = at<Integers>(weights + i), half = at<Integers>(halves + i);
      return {joined(high_from(weight, 0), signed_from(half, 0)), joined(high_from(weight, 1), signed_from(half, 1))};
    }
    void write_pair(int64_t i, Pair p) const {
      const Integers a = numbers(p.low), b = numbers(p.high);
      put<false>(static_cast<void*>(halves + i), low_halves(a, b));
      put<false>(static_cast<void*>(weights + i), high_halves(add(a, 0x8000), add(b, 0x8000)));
    }

   private:
    static Lanes joined(Integers high, Integers half) {
      const Lanes master{same_bits<Register>(sum(high, unless_zero(high, half)))};
      return where(is_nan(master), Lanes{same_bits<Register>(high)}, master);
    }
#endif
  };

  // Without a master the weight is read as FP32, and rounded stochastically with 16 random bits per element.
  struct Rounded {
    c10::BFloat16* weights;
    const uint16_t* random;

    float read(int64_t i) const { return static_cast<float>(weights[i]); }
    void write(int64_t i, float p) const { weights[i] = round_stochastically(p, random[i]); }
#if AMP_PATCH_WIDTH > 1
    Pair read_pair(int64_t i) const { return fetch(weights + i); }
    void write_pair(int64_t i, Pair p) const {
      const Integers bits = at<Integers>(random + i);
      put<false>(static_cast<void*>(weights + i),
                 high_halves(rounded_up(p.low, unsigned_from(bits, 0)), rounded_up(p.high, unsigned_from(bits, 1))));
    }

   private:
    static Integers rounded_up(Lanes p, Integers bits) {
      const Integers number = numbers(p);
      return sum(number, if_below(number, kLargestBFloat16, bits));
    }
#endif
  };

  static constexpr int kGroups = 16;  // the most groups that fill_random makes at once

  // Writes the random bits of `count` groups of kDrawn elements, from group `first` on, a multiple of kGroups. `out`
  // must have room for the next multiple of kGroups groups.
  __attribute__((flatten)) static void fill_random(uint64_t seed, uint64_t draw, int64_t first, int64_t count,
                                                   uint16_t* out) {
#if AMP_PATCH_WIDTH > 1
    const auto high_word = [](uint64_t x) { return static_cast<uint32_t>(x >> 32); };
    for (int64_t group = 0; group < count; group += AMP_PATCH_WIDTH) {
      const uint64_t counter = first + group;  // a multiple of the width, so that adding to its low word does not carry
      const Integers counters = counted(static_cast<uint32_t>(counter)), carried = fill_integers(high_word(counter));
      const Integers low = fill_integers(static_cast<uint32_t>(draw)), high = fill_integers(high_word(draw));
      // A product of 32 bits by 32 fills two elements, so counters are multiplied in two halves, the even counters and
      // the odd counters.
      Integers even[4] = {counters, carried, low, high}, odd[4] = {odd_of(counters), carried, low, high};
      uint32_t key0 = static_cast<uint32_t>(seed), key1 = high_word(seed);
      for (int round = 0; round < kPhiloxRounds; ++round) {
        for (auto* const words : {even, odd}) {
          const Integers first = product(words[0], kPhiloxFactors[0]), second = product(words[2], kPhiloxFactors[1]);
          words[0] = exclusive(odd_of(second), words[1], key0);
          words[1] = second;
          words[2] = exclusive(odd_of(first), words[3], key1);
          words[3] = first;
        }
        key0 += kPhiloxKeys[0];
        key1 += kPhiloxKeys[1];
      }
      Integers words[4];
      for (int w = 0; w < 4; ++w) words[w] = zipped(even[w], odd[w]);
      transpose(words);
      for (int w = 0; w < 4; ++w) {
        put<false>(static_cast<void*>(out + group * kDrawn + 2 * AMP_PATCH_WIDTH * w), words[w]);
      }
    }
#else
    for (int64_t group = 0; group < count; ++group) {
      uint32_t words[4];
      random_words(seed, draw, first + group, words);
      for (int i = 0; i < kDrawn; ++i) out[group * kDrawn + i] = static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2));
    }
#endif
  }

  struct Set {
    // Makes one step of `f` on n elements. If n is not a multiple of 8, they are the last of their tensor.
    template <class F, class Grad, class Masters>
    __attribute__((flatten)) static void step(const F& functor, const typename F::Rates& tensor_rates, int64_t n,
                                              const Grad* grad, Masters masters, float* const* states) {
      const F f = functor;  // by value: otherwise the compiler would reload its members after each store
      const typename F::Rates rates = tensor_rates;
      constexpr int S = F::kStates;
      float* state[S + 1] = {};
      for (int s = 0; s < S; ++s) state[s] = states[s];
      int64_t i = 0;
#if AMP_PATCH_WIDTH > 1
      for (; i + 2 * AMP_PATCH_WIDTH <= n; i += 2 * AMP_PATCH_WIDTH) {
        const Pair g = fetch(grad + i);
        Pair p = masters.read_pair(i);
        Lanes first[S + 1], second[S + 1];
        for (int s = 0; s < S; ++s) {
          const Pair both = fetch(state[s] + i);
          first[s] = both.low;
          second[s] = both.high;
        }
        f.template step<false>(rates, g.low, p.low, first);
        f.template step<false>(rates, g.high, p.high, second);
        masters.write_pair(i, p);
        for (int s = 0; s < S; ++s) put<false>(state[s] + i, Pair{first[s], second[s]});
      }
#endif
      const auto one = [&](auto tail) {
        float p = masters.read(i), own[S + 1];
        for (int s = 0; s < S; ++s) own[s] = state[s][i];
        f.template step<decltype(tail)::value>(rates, static_cast<float>(grad[i]), p, own);
        masters.write(i, p);
        for (int s = 0; s < S; ++s) state[s][i] = own[s];
      };
      for (; i < n - n % 8; ++i) one(std::false_type());
      for (; i < n; ++i) one(std::true_type());
    }

    // Converts masters of one form to another.
    template <class From, class To>
    __attribute__((flatten)) static void convert(int64_t n, From from, To to) {
      int64_t i = 0;
#if AMP_PATCH_WIDTH > 1
      for (; i + 2 * AMP_PATCH_WIDTH <= n; i += 2 * AMP_PATCH_WIDTH) to.write_pair(i, from.read_pair(i));
#endif
      for (; i < n; ++i) to.write(i, from.read(i));
    }
  };
};

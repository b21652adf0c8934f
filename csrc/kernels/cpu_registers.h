// The vector registers of one instruction set: the type that functors compute in on the CPU, and the conversion of
// elements of each dtype to it and back. A .cpp file includes this once for each set (so there is no `#pragma once`),
// each time in a separate namespace and under that set's target pragma. AMP_PATCH_WIDTH is the number of floats in a
// register: 16 (AVX-512), 8 (AVX2 and F16C) or 1 (any machine: plain floats, nothing of this file). Nothing is fused
// here.

#if AMP_PATCH_WIDTH > 1

#if AMP_PATCH_WIDTH == 16

using Register = __m512;
using Integers = __m512i;
using Halves = __m256i;  // a register's elements, 16 bits each; two of these make an Integers

struct Mask {
  __mmask16 m;
};
inline Mask operator&(Mask a, Mask b) { return {static_cast<__mmask16>(a.m & b.m)}; }
inline Mask operator|(Mask a, Mask b) { return {static_cast<__mmask16>(a.m | b.m)}; }
inline Mask operator!(Mask a) { return {static_cast<__mmask16>(~a.m)}; }
inline bool any(Mask a) { return a.m != 0; }

template <int kPredicate>
Mask compare(Register a, Register b) {
  return {_mm512_cmp_ps_mask(a, b, kPredicate)};
}
inline Register select(Mask mask, Register a, Register b) { return _mm512_mask_blend_ps(mask.m, b, a); }
inline Register broadcast(float x) { return _mm512_set1_ps(x); }

inline Register widen(Halves v) { return _mm512_cvtph_ps(v); }
inline Halves narrow(Register v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
inline Integers join(Halves a, Halves b) { return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1); }
inline Halves half_of(Integers v, int which) {
  return which == 0 ? _mm512_castsi512_si256(v) : _mm512_extracti64x4_epi64(v, 1);
}
// The high 16 bits of each element of two registers, in order, as one register: rounded FP32 to BF16.
inline Integers high_halves(Integers a, Integers b) {
  const Integers odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                        23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return _mm512_permutex2var_epi16(a, odd, b);
}
// The inverse of high_halves: the 16-bit elements in one half of `v`, each as the high half of 32 bits.
inline Integers high_from(Integers v, int which) {
  return _mm512_slli_epi32(_mm512_cvtepu16_epi32(half_of(v, which)), 16);
}
inline Integers add(Integers a, int b) { return _mm512_add_epi32(a, _mm512_set1_epi32(b)); }
// v + 1 if bit 16 of `bits`, the last bit of the BF16 result, is set: so ties round to even.
inline Integers add_odd(Integers v, Integers bits) {
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  return _mm512_mask_add_epi32(v, odd, v, _mm512_set1_epi32(1));
}
inline void stream(void* p, Integers v) { _mm512_stream_si512(static_cast<Integers*>(p), v); }

#else

using Register = __m256;
using Integers = __m256i;
using Halves = __m128i;

struct Mask {
  Register m;
};
inline Mask operator&(Mask a, Mask b) { return {_mm256_and_ps(a.m, b.m)}; }
inline Mask operator|(Mask a, Mask b) { return {_mm256_or_ps(a.m, b.m)}; }
inline Mask operator!(Mask a) { return {_mm256_xor_ps(a.m, _mm256_castsi256_ps(_mm256_set1_epi32(-1)))}; }
inline bool any(Mask a) { return _mm256_movemask_ps(a.m) != 0; }

template <int kPredicate>
Mask compare(Register a, Register b) {
  return {_mm256_cmp_ps(a, b, kPredicate)};
}
inline Register select(Mask mask, Register a, Register b) { return _mm256_blendv_ps(b, a, mask.m); }
inline Register broadcast(float x) { return _mm256_set1_ps(x); }

inline Register widen(Halves v) { return _mm256_cvtph_ps(v); }
inline Halves narrow(Register v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
inline Integers join(Halves a, Halves b) { return _mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1); }
inline Halves half_of(Integers v, int which) {
  return which == 0 ? _mm256_castsi256_si128(v) : _mm256_extracti128_si256(v, 1);
}
inline Integers high_halves(Integers a, Integers b) {
  const Integers mixed = _mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16));
  return _mm256_permute4x64_epi64(mixed, 0xD8);
}
inline Integers high_from(Integers v, int which) {
  return _mm256_slli_epi32(_mm256_cvtepu16_epi32(half_of(v, which)), 16);
}
inline Integers add(Integers a, int b) { return _mm256_add_epi32(a, _mm256_set1_epi32(b)); }
inline Integers add_odd(Integers v, Integers bits) {
  return _mm256_add_epi32(v, _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1)));
}
inline void stream(void* p, Integers v) { _mm256_stream_si256(static_cast<Integers*>(p), v); }

#endif

inline Mask operator&(Mask a, bool b) { return b ? a : Mask(); }

// The type that a functor computes in: V in functors.h.
struct Lanes {
  Register v;
};
inline Lanes operator+(Lanes a, Lanes b) { return {a.v + b.v}; }
inline Lanes operator-(Lanes a, Lanes b) { return {a.v - b.v}; }
inline Lanes operator*(Lanes a, Lanes b) { return {a.v * b.v}; }
inline Lanes operator*(Lanes a, float b) { return {a.v * broadcast(b)}; }
inline Lanes operator*(float a, Lanes b) { return {broadcast(a) * b.v}; }
inline Lanes operator-(Lanes a) { return {-a.v}; }
inline Mask operator<(Lanes a, float b) { return compare<_CMP_LT_OQ>(a.v, broadcast(b)); }
inline Mask operator==(Lanes a, Lanes b) { return compare<_CMP_EQ_OQ>(a.v, b.v); }
inline Lanes where(Mask condition, Lanes a, Lanes b) { return {select(condition, a.v, b.v)}; }

template <class To, class From>
To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// The loop takes two registers of FP32 at a time: 16-bit elements of that number fill one register.
struct Pair {
  Lanes low, high;
};

inline Pair unpack(Integers v, c10::Half) { return {{widen(half_of(v, 0))}, {widen(half_of(v, 1))}}; }
inline Integers pack(Pair p, c10::Half) { return join(narrow(p.low.v), narrow(p.high.v)); }
inline Pair unpack(Integers v, c10::BFloat16) {
  return {{same_bits<Register>(high_from(v, 0))}, {same_bits<Register>(high_from(v, 1))}};
}
// Rounds to nearest, ties to even. Not by the processor's BF16 instruction, which treats subnormal numbers as 0.
inline Integers pack(Pair p, c10::BFloat16) {
  const Mask nan = compare<_CMP_UNORD_Q>(p.low.v, p.high.v);  // true where either one is a NaN
  if (__builtin_expect(any(nan), false)) {                    // rounding could carry from a NaN's bits into the sign
    const Register quiet = same_bits<Register>(add(Integers(), 0x7FC00000));
    p.low.v = select(compare<_CMP_UNORD_Q>(p.low.v, p.low.v), quiet, p.low.v);
    p.high.v = select(compare<_CMP_UNORD_Q>(p.high.v, p.high.v), quiet, p.high.v);
  }
  const Integers a = same_bits<Integers>(p.low.v), b = same_bits<Integers>(p.high.v);
  return high_halves(add_odd(add(a, 0x7FFF), a), add_odd(add(b, 0x7FFF), b));
}

template <bool kStream>
void put(void* p, Integers v) {
  kStream ? stream(p, v) : static_cast<void>(std::memcpy(p, &v, sizeof(v)));
}
template <bool kStream>
void put(float* p, Pair pair) {
  put<kStream>(static_cast<void*>(p), same_bits<Integers>(pair.low.v));
  put<kStream>(static_cast<void*>(p + AMP_PATCH_WIDTH), same_bits<Integers>(pair.high.v));
}
template <bool kStream, class Half>
void put(Half* p, Pair pair) {
  put<kStream>(static_cast<void*>(p), pack(pair, Half()));
}
template <class Whole>
Whole at(const void* p) {
  Whole v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
inline Pair fetch(const float* p) { return {{at<Register>(p)}, {at<Register>(p + AMP_PATCH_WIDTH)}}; }
template <class Half>
Pair fetch(const Half* p) {
  return unpack(at<Integers>(p), Half());
}

template <class Element>
Pair rounded(Pair pair) {
  if constexpr (std::is_same_v<Element, float>) {
    return pair;
  } else {
    return unpack(pack(pair, Element()), Element());
  }
}
inline Lanes round_to(c10::ScalarType dtype, Lanes v) {
  if (dtype == c10::ScalarType::Half) return rounded<c10::Half>({v, v}).low;
  if (dtype == c10::ScalarType::BFloat16) return rounded<c10::BFloat16>({v, v}).low;
  return v;
}

#endif

// A block's codes into FP32 and back, for one instruction set: step_vectors.h includes this, once for each set. Every
// set gives the same bits.

#if AMP_PATCH_WIDTH > 1

#if AMP_PATCH_WIDTH == 16
// Eight numbers, found by the low three bits of an index, of which the fourth may be anything.
struct CodeTable {
  Register v;

  explicit CodeTable(const float (&numbers)[8]) {
    const __m256 eight = _mm256_loadu_ps(numbers);
    v = _mm512_insertf32x8(_mm512_castps256_ps512(eight), eight, 1);
  }
  Lanes operator[](Integers index) const { return {_mm512_permutexvar_ps(index, v)}; }
};
template <bool kSigned>
Integers fetch_codes(const uint8_t* p) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return kSigned ? _mm512_cvtepi8_epi32(codes) : _mm512_cvtepu8_epi32(codes);
}
template <bool kSigned>
void put_codes(uint8_t* p, Integers codes) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(codes));
}
inline Integers exponents(Lanes a) { return _mm512_srli_epi32(_mm512_castps_si512(a.v), 23); }
inline Lanes magnitude(Lanes a) { return {_mm512_abs_ps(a.v)}; }
// `a`, with its sign changed where `b` has one.
inline Lanes with_sign(Lanes a, Lanes b) {
  const Integers sign = _mm512_set1_epi32(static_cast<int>(kSignBit));
  return {
      _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v), sign, 0x78))};
}
inline Lanes unless_code_is_zero(Integers codes, Lanes a) {
  return {_mm512_maskz_mov_ps(_mm512_test_epi32_mask(codes, codes), a.v)};
}
inline Integers whole(Lanes a) { return _mm512_cvttps_epi32(a.v); }
inline Lanes lanes_of(Integers a) { return {_mm512_cvtepi32_ps(a)}; }
inline Integers replaced(Integers a, Mask mask, int b) {
  return _mm512_mask_mov_epi32(a, mask.m, _mm512_set1_epi32(b));
}
inline Integers one_more(Integers a, Mask mask) { return _mm512_mask_add_epi32(a, mask.m, a, _mm512_set1_epi32(1)); }
inline Integers rotated(Integers a) { return _mm512_rol_epi32(a, 1); }
inline Integers most_unsigned(Integers a, Integers b) { return _mm512_max_epu32(a, b); }
inline Integers not_negative(Integers a) { return _mm512_max_epi32(a, _mm512_setzero_si512()); }
inline Lanes least(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
#else
struct CodeTable {
  Register v;

  explicit CodeTable(const float (&numbers)[8]) : v(_mm256_loadu_ps(numbers)) {}
  Lanes operator[](Integers index) const { return {_mm256_permutevar8x32_ps(v, index)}; }
};
template <bool kSigned>
Integers fetch_codes(const uint8_t* p) {
  const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return kSigned ? _mm256_cvtepi8_epi32(codes) : _mm256_cvtepu8_epi32(codes);
}
template <bool kSigned>
void put_codes(uint8_t* p, Integers codes) {
  const __m128i low = _mm256_castsi256_si128(codes), high = _mm256_extracti128_si256(codes, 1);
  const __m128i words = kSigned ? _mm_packs_epi32(low, high) : _mm_packus_epi32(low, high);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p),
                   kSigned ? _mm_packs_epi16(words, words) : _mm_packus_epi16(words, words));
}
inline Integers exponents(Lanes a) { return _mm256_srli_epi32(_mm256_castps_si256(a.v), 23); }
inline Lanes magnitude(Lanes a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline Lanes with_sign(Lanes a, Lanes b) { return {_mm256_xor_ps(a.v, _mm256_and_ps(b.v, _mm256_set1_ps(-0.0f)))}; }
inline Lanes unless_code_is_zero(Integers codes, Lanes a) {
  return {_mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(codes, _mm256_setzero_si256())), a.v)};
}
inline Integers whole(Lanes a) { return _mm256_cvttps_epi32(a.v); }
inline Lanes lanes_of(Integers a) { return {_mm256_cvtepi32_ps(a)}; }
inline Integers replaced(Integers a, Mask mask, int b) {
  return _mm256_blendv_epi8(a, _mm256_set1_epi32(b), _mm256_castps_si256(mask.m));
}
inline Integers one_more(Integers a, Mask mask) { return _mm256_sub_epi32(a, _mm256_castps_si256(mask.m)); }
inline Integers rotated(Integers a) { return _mm256_or_si256(_mm256_slli_epi32(a, 1), _mm256_srli_epi32(a, 31)); }
inline Integers most_unsigned(Integers a, Integers b) { return _mm256_max_epu32(a, b); }
inline Integers not_negative(Integers a) { return _mm256_max_epi32(a, _mm256_setzero_si256()); }
inline Lanes least(Lanes a, Lanes b) { return {_mm256_min_ps(a.v, b.v)}; }
#endif

inline Mask at_least(Lanes a, Lanes b) { return compare<_CMP_GE_OQ>(a.v, b.v); }

#endif

template <bool kSigned>
struct CodeLoops {
  // n elements, of one block: codes into FP32.
  __attribute__((flatten)) static void decode(const uint8_t* codes, float scale, int64_t n, float* out) {
    const CodeMap& map = kCodeMap<kSigned>;
    int64_t i = 0;
#if AMP_PATCH_WIDTH > 1
    const CodeTable slope(map.slope), offset(map.offset);
    for (; i + AMP_PATCH_WIDTH <= n; i += AMP_PATCH_WIDTH) {
      const Integers code = fetch_codes<kSigned>(codes + i);
      const Lanes m = lanes_of(code);
      const Integers place = exponents(m);
      const Lanes from = kSigned ? with_sign(offset[place], m) : offset[place];
      const Lanes value = unless_code_is_zero(code, fused(m, slope[place], from)) * scale;
      put<false>(static_cast<void*>(out + i), same_bits<Integers>(value.v));
    }
#else
    static const std::array<float, 256> numbers = [&] {
      std::array<float, 256> made{};
      for (int code = 0; code < 256; ++code) made[code] = number_of<kSigned>(map, static_cast<uint8_t>(code));
      return made;
    }();
    for (; i < n; ++i) out[i] = numbers[codes[i]] * scale;
#endif
    for (; i < n; ++i) out[i] = number_of<kSigned>(map, codes[i]) * scale;
  }

  // n elements, of one block: FP32 into codes; returns their scale.
  __attribute__((flatten)) static float encode(const float* values, int64_t n, uint8_t* codes) {
    const CodeMap& map = kCodeMap<kSigned>;
    const float scale = scale_of<kSigned>(highest_rank(values, n));
    if (!has_numbers(scale)) {
      std::memset(codes, 0, n);
      return scale;
    }
    const Inverse inverse(scale);
    int64_t i = 0;
#if AMP_PATCH_WIDTH > 1
    const CodeTable next(map.next), rate(map.rate), start(map.start), limit(map.limit);
    const Lanes one{broadcast(map.one)}, slope{broadcast(kGuessSlope)}, offset{broadcast(-kGuessStart)};
    for (; inverse.first == 1 && i + AMP_PATCH_WIDTH <= n; i += AMP_PATCH_WIDTH) {
      const Lanes y = Lanes{at<Register>(values + i)} * inverse.second, size = kSigned ? magnitude(y) : y;
      Integers region = not_negative(whole(fused(lanes_of(same_bits<Integers>(size.v)), slope, offset)));
      region = one_more(region, at_least(size, next[region]));
      const Lanes m = least(plus(times(size, rate[region]), start[region]), limit[region]);
      const Integers code = whole(kSigned ? with_sign(m, y) : m);
      put_codes<kSigned>(codes + i, replaced(code, at_least(y, one), kSigned ? kSignedOne : kUnsignedOne));
    }
#endif
    for (; i < n; ++i) codes[i] = code_of<kSigned>(map, inverse.of(values[i]));
    return scale;
  }

 private:
  static uint32_t highest_rank(const float* values, int64_t n) {
    uint32_t rank = 0;
    int64_t i = 0;
#if AMP_PATCH_WIDTH > 1
    Integers ranks{};
    for (; i + AMP_PATCH_WIDTH <= n; i += AMP_PATCH_WIDTH) {
      const Integers bits = at<Integers>(values + i);
      ranks = most_unsigned(ranks, kSigned ? rotated(bits) : bits);
    }
    uint32_t each[AMP_PATCH_WIDTH];
    put<false>(static_cast<void*>(each), ranks);
    for (const uint32_t other : each) rank = std::max(rank, other);
    if (!kSigned && rank >= kSignBit) i = rank = 0;  // one has a sign, a NaN perhaps: look at each
#endif
    for (; i < n; ++i) rank = std::max(rank, rank_of<kSigned>(values[i]));
    return rank;
  }
};

struct CodesOfState {
  using Signed = CodeLoops<true>;
  using Unsigned = CodeLoops<false>;
};

// A block's codes into FP32 and back, for one instruction set: step_vectors.h includes this, once for each set. Every
// set gives the same bits.

#if AMP_PATCH_WIDTH > 1

inline Mask at_least(Lanes a, Lanes b) { return compare<_CMP_GE_OQ>(a.v, b.v); }

#if AMP_PATCH_WIDTH == 16
// Numbers that are found by the low bits of an index: by three, of which the fourth may be anything, or by four.
struct CodeTable {
  Register v;

  explicit CodeTable(const float (&numbers)[8]) {
    const __m256 eight = _mm256_loadu_ps(numbers);
    v = _mm512_insertf32x8(_mm512_castps256_ps512(eight), eight, 1);
  }
  explicit CodeTable(const float (&numbers)[16]) : v(_mm512_loadu_ps(numbers)) {}
  Lanes operator[](Integers index) const { return {_mm512_permutexvar_ps(index, v)}; }
};
template <bool kSigned>
Integers fetch_codes(const uint8_t* p) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return kSigned ? _mm512_cvtepi8_epi32(codes) : _mm512_cvtepu8_epi32(codes);
}
template <bool kSigned>
void put_codes(uint8_t* p, Integers codes) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), kSigned ? _mm512_cvtsepi32_epi8(codes) : _mm512_cvtepi32_epi8(codes));
}
inline Integers exponents(Lanes a) { return _mm512_srli_epi32(_mm512_castps_si512(a.v), 23); }
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
inline Integers one_more(Integers a, Mask mask) { return _mm512_mask_add_epi32(a, mask.m, a, _mm512_set1_epi32(1)); }
inline Integers rotated(Integers a) { return _mm512_rol_epi32(a, 1); }
inline Integers most_unsigned(Integers a, Integers b) { return _mm512_max_epu32(a, b); }
inline Lanes least(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
// |a|, or in the unsigned map, where negative numbers are zero, `a`; at least kSmallest.
template <bool kSigned>
Lanes size_of(Lanes a) {
  const Register smallest = broadcast(kSmallest);
  return {kSigned ? _mm512_range_ps(a.v, smallest, 0xB) : _mm512_max_ps(a.v, smallest)};
}
template <bool kSigned>
struct Regions {
  const CodeTable border;
  const Integers lowest;

  Regions() : border(kCodeMap<kSigned>.border), lowest(_mm512_loadu_si512(kCodeMap<kSigned>.lowest)) {}
  Integers operator()(Lanes size) const {
    const Integers place = _mm512_srli_epi32(_mm512_castps_si512(size.v), 24);
    return one_more(_mm512_permutexvar_epi32(place, lowest), at_least(size, border[place]));
  }
  Lanes with_end(Lanes, Lanes m) const { return m; }
};
#else
struct CodeTable {
  Register v;

  explicit CodeTable(const float* numbers) : v(_mm256_loadu_ps(numbers)) {}  // the first eight
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
inline Lanes with_sign(Lanes a, Lanes b) { return {_mm256_xor_ps(a.v, _mm256_and_ps(b.v, _mm256_set1_ps(-0.0f)))}; }
inline Lanes unless_code_is_zero(Integers codes, Lanes a) {
  return {_mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(codes, _mm256_setzero_si256())), a.v)};
}
inline Integers whole(Lanes a) { return _mm256_cvttps_epi32(a.v); }
inline Lanes lanes_of(Integers a) { return {_mm256_cvtepi32_ps(a)}; }
inline Integers one_more(Integers a, Mask mask) { return _mm256_sub_epi32(a, _mm256_castps_si256(mask.m)); }
inline Integers rotated(Integers a) { return _mm256_or_si256(_mm256_slli_epi32(a, 1), _mm256_srli_epi32(a, 31)); }
inline Integers most_unsigned(Integers a, Integers b) { return _mm256_max_epu32(a, b); }
inline Lanes least(Lanes a, Lanes b) { return {_mm256_min_ps(a.v, b.v)}; }
template <bool kSigned>
Lanes size_of(Lanes a) {
  const Register size = kSigned ? _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v) : a.v;
  return {_mm256_max_ps(size, broadcast(kSmallest))};
}
// The bits of a number, as a number, are a guess of its region: that, or the one below. A table has no place for region
// 8, which finds the m of region 0.
template <bool kSigned>
struct Regions {
  static constexpr float kSlope = 1.0f / (3.1f * 8388608), kOffset = 7.55f - 127 / 3.1f;
  const CodeTable next;

  Regions() : next(kCodeMap<kSigned>.next) {}
  Integers operator()(Lanes size) const {
    const Lanes bits = lanes_of(same_bits<Integers>(size.v));
    const Integers guess = whole(fused(bits, Lanes{broadcast(kSlope)}, Lanes{broadcast(kOffset)}));
    return one_more(guess, at_least(size, next[guess]));
  }
  Lanes with_end(Lanes size, Lanes m) const {
    const Lanes one{broadcast(kCodeMap<kSigned>.next[7])}, end{broadcast(kSigned ? 128 : 1)};
    return where(at_least(size, one), end, m);
  }
};
#endif

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
    const Regions<kSigned> regions;
    const CodeTable rate(map.rate), start(map.start), limit(map.limit);
    for (; inverse.first == 1 && i + AMP_PATCH_WIDTH <= n; i += AMP_PATCH_WIDTH) {
      const Lanes y = Lanes{at<Register>(values + i)} * inverse.second, size = size_of<kSigned>(y);
      const Integers region = regions(size);
      const Lanes linear = least(plus(times(size, rate[region]), start[region]), limit[region]);
      const Lanes m = regions.with_end(size, linear);
      put_codes<kSigned>(codes + i, whole(kSigned ? with_sign(m, y) : m));
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

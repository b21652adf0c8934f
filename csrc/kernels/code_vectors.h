// Decodes the codes (codes.h) of a block to FP32, and encodes them. step_vectors.h includes this once for each
// instruction set. Every set gives the same bits.

#if AMP_PATCH_WIDTH > 1
using Words = uint16_t __attribute__((vector_size(sizeof(Integers))));
using SignedWords = int16_t __attribute__((vector_size(sizeof(Integers))));
using Bytes = uint8_t __attribute__((vector_size(sizeof(Integers) / 2)));
using SignedBytes = int8_t __attribute__((vector_size(sizeof(Integers) / 2)));
using Bits = uint32_t __attribute__((vector_size(sizeof(Integers))));
#endif

template <bool kSigned>
struct CodeLoops {
  // Decodes n elements of one block into `out`.
  __attribute__((flatten)) static void decode(const uint8_t* codes, float scale, int64_t n, float* out) {
    const float unit = scale / kTop<kSigned>;
    int64_t i = 0;
#if AMP_PATCH_WIDTH > 1
    for (; i + 2 * AMP_PATCH_WIDTH <= n; i += 2 * AMP_PATCH_WIDTH) {
      Words half;
      if constexpr (kSigned) {
        half = Words(__builtin_convertvector(at<SignedBytes>(codes + i), SignedWords) << 7) & 0xBFFF;
      } else {
        half = __builtin_convertvector(at<Bytes>(codes + i), Words) << 7;
      }
      const Pair numbers = unpack(same_bits<Integers>(half), c10::Half());
      put<false>(out + i, Pair{numbers.low * unit, numbers.high * unit});
    }
#endif
    for (; i < n; ++i) out[i] = number_of<kSigned>(codes[i], unit);
  }

  // Encodes n elements of one block into `codes`; returns their scale.
  __attribute__((flatten)) static float encode(const float* values, int64_t n, uint8_t* codes) {
    const float scale = scale_of<kSigned>(most_of(values, n));
    if (!has_numbers(scale)) {
      std::memset(codes, 0, n);
      return scale;
    }
    const float inverse = kTop<kSigned> / scale;
    const uint16_t least = least_of<kSigned>(scale);
    int64_t i = 0;
#if AMP_PATCH_WIDTH > 1
    for (; i + 2 * AMP_PATCH_WIDTH <= n; i += 2 * AMP_PATCH_WIDTH) {
      const Pair x = fetch(values + i), y{x.low * inverse, x.high * inverse};
      const Words half = same_bits<Words>(pack(y, c10::Half()));
      const Words own = same_bits<Words>(low_halves(same_bits<Integers>(y.low.v), same_bits<Integers>(y.high.v)));
      const Words size = (half & 0x7FFF) + (own & 0x7F);
      const Words code = (size < least ? least : size) >> 7;
      const Bytes made = __builtin_convertvector(kSigned ? code | (half >> 8 & 0x80) : code, Bytes);
      std::memcpy(codes + i, &made, sizeof(made));
    }
#endif
    for (; i < n; ++i) codes[i] = code_of<kSigned>(values[i] * inverse, least);
    return scale;
  }

 private:
  // The FP32 bits of the largest magnitude; the bits of a NaN are above all numbers'.
  static uint32_t most_of(const float* values, int64_t n) {
    uint32_t most = 0;
    int64_t i = 0;
#if AMP_PATCH_WIDTH > 1
    Bits found{};
    for (; i + AMP_PATCH_WIDTH <= n; i += AMP_PATCH_WIDTH) {
      const Bits size = at<Bits>(values + i) & 0x7FFFFFFF;
      found = size > found ? size : found;
    }
    for (int k = 0; k < AMP_PATCH_WIDTH; ++k) most = std::max<uint32_t>(most, found[k]);
#endif
    for (; i < n; ++i) most = std::max(most, bits_of(values[i]) & 0x7FFFFFFFu);
    return most;
  }
};

struct CodesOfState {
  using Signed = CodeLoops<true>;
  using Unsigned = CodeLoops<false>;
};

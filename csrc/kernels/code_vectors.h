// Decodes the codes (codes.h) of a block to FP32, and encodes them. step_vectors.h includes this once for each
// instruction set. Every set gives the same bits.

#if AMP_PATCH_WIDTH > 1
using Words = uint16_t __attribute__((vector_size(sizeof(Integers))));
using SignedWords = int16_t __attribute__((vector_size(sizeof(Integers))));
using Bytes = uint8_t __attribute__((vector_size(sizeof(Integers) / 2)));
using SignedBytes = int8_t __attribute__((vector_size(sizeof(Integers) / 2)));
using Bits = uint32_t __attribute__((vector_size(sizeof(Integers))));
#endif

template <Codes kCodes>
struct CodeLoops {
  static constexpr bool kSigned = kCodes != Codes::kUnsigned;

  // Decodes n elements of one block into `out`.
  template <class Element>
  __attribute__((flatten)) static void decode(const uint8_t* codes, float scale, int64_t n, Element* out) {
    const float unit = scale / kTop<kCodes>;
    int64_t i = 0;
#if AMP_PATCH_WIDTH > 1
    for (; i + 2 * AMP_PATCH_WIDTH <= n; i += 2 * AMP_PATCH_WIDTH) {
      Words half;
      if constexpr (kSigned) {
        half = Words(__builtin_convertvector(at<SignedBytes>(codes + i), SignedWords) << 7) & 0xBFFF;
        if constexpr (kCodes == Codes::kKept) {
          half = (half & 0x3F80) == Words{} + uint16_t{kInfiniteCode << 7} ? (half & 0x8000) | 0x7C00 : half;
        }
      } else {
        half = __builtin_convertvector(at<Bytes>(codes + i), Words) << 7;
      }
      const Pair numbers = unpack(same_bits<Integers>(half), c10::Half());
      put<false>(out + i, Pair{numbers.low * unit, numbers.high * unit});
    }
#endif
    for (; i < n; ++i) out[i] = static_cast<Element>(number_of<kCodes>(codes[i], unit));
  }

  // Encodes n elements of one block into `codes`; returns their scale.
  template <class Element>
  __attribute__((flatten)) static float encode(const Element* values, int64_t n, uint8_t* codes) {
    const float scale = scale_of<kCodes>(most_of(values, n));
    if (!has_numbers(scale)) {
      std::memset(codes, 0, n);
      return scale;
    }
    const float inverse = kTop<kCodes> / scale;
    const uint16_t least = least_of<kCodes>(scale);
    int64_t i = 0;
#if AMP_PATCH_WIDTH > 1
    for (; i + 2 * AMP_PATCH_WIDTH <= n; i += 2 * AMP_PATCH_WIDTH) {
      const Pair x = fetch(values + i), y{x.low * inverse, x.high * inverse};
      const Words half = same_bits<Words>(pack(y, c10::Half()));
      const Words own = same_bits<Words>(low_halves(same_bits<Integers>(y.low.v), same_bits<Integers>(y.high.v)));
      const Words size = (half & 0x7FFF) + (own & 0x7F);
      Words floor = Words{} + least;
      if constexpr (kCodes == Codes::kKept) {
        const auto low = size_of(x.low) != 0, high = size_of(x.high) != 0;
        floor &= same_bits<Words>(low_halves(same_bits<Integers>(low), same_bits<Integers>(high)));
      }
      Words code = (size < floor ? floor : size) >> 7;
      if constexpr (kCodes == Codes::kKept) code = code > kInfiniteCode ? Words{} + kInfiniteCode : code;
      const Bytes made = __builtin_convertvector(kSigned ? code | (half >> 8 & 0x80) : code, Bytes);
      std::memcpy(codes + i, &made, sizeof(made));
    }
#endif
    for (; i < n; ++i) codes[i] = code_of<kCodes>(static_cast<float>(values[i]), inverse, least);
    return scale;
  }

 private:
  // The FP32 bits of the largest magnitude; the bits of a NaN are above all numbers'.
  template <class Element>
  static uint32_t most_of(const Element* values, int64_t n) {
    uint32_t most = 0;
    int64_t i = 0;
#if AMP_PATCH_WIDTH > 1
    Bits found{};
    for (; i + 2 * AMP_PATCH_WIDTH <= n; i += 2 * AMP_PATCH_WIDTH) {
      const Pair x = fetch(values + i);
      const Bits low = counted(size_of(x.low)), high = counted(size_of(x.high));
      found = low > found ? low : found;
      found = high > found ? high : found;
    }
    for (int k = 0; k < AMP_PATCH_WIDTH; ++k) most = std::max<uint32_t>(most, found[k]);
#endif
    for (; i < n; ++i) {
      most = std::max(most, amp_patch::counted<kCodes>(bits_of(static_cast<float>(values[i])) & 0x7FFFFFFFu));
    }
    return most;
  }

#if AMP_PATCH_WIDTH > 1
  static Bits size_of(Lanes x) { return same_bits<Bits>(x.v) & 0x7FFFFFFF; }
  static Bits counted(Bits size) {
    if constexpr (kCodes != Codes::kKept) return size;
    return (size >= kMost) & (size <= kInfinite) ? Bits{} + 1 : size;
  }
#endif
};

struct CodesOfState {
  using Signed = CodeLoops<Codes::kSigned>;
  using Unsigned = CodeLoops<Codes::kUnsigned>;
  using Kept = CodeLoops<Codes::kKept>;
};

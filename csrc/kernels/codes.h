// Eight bits for a number of an optimizer's state: a code, and for each kBlock elements, in the order of memory, one
// FP32 scale. The codes are those of the dynamic map of Dettmers et al., "8-bit Optimizers via Block-wise Quantization"
// (arXiv:2110.02861): seven decades from 1e-7 to 1, each with twice as many numbers as the one below it, equally far
// from each other.
//
// The highest bit of the magnitude m of a code says which decade, so no table is searched. With e = floor(log2(m)) and
// the decade D the number is D * (0.1 + 0.9 * ((m + 0.5) / 2^e - 1)), and m = 0 is 0:
//   unsigned (uint8)  m is the code; e is 1 to 7, D = 10^(e - 7); the code 1 is the number 1
//   signed (int8)     the code is m with the number's sign; e is 0 to 6, D = 10^(e - 6); the code -128 is the number -1
//
// The scale is the block's element of the largest magnitude; where the map is signed, its negative: so that element is
// the number 1, or -1, and comes back to the bit. Then code -> FP32 -> code is exact. A block whose largest is below
// 2^-126 is zeros. One with an infinity or a NaN is NaN as a whole: its scale is.
#pragma once

#include <cmath>
#include <cstdint>

#include "steps.h"

namespace amp_patch {

constexpr int64_t kBlock = 256;

constexpr int64_t blocks_in(int64_t elements) { return (elements + kBlock - 1) / kBlock; }

constexpr uint32_t kInfinite = 0x7F800000u, kSmallestNormal = 0x00800000u, kSignBit = 0x80000000u;

// The numbers of a map. Its regions: 0 around zero, 1 to 7 for the decades from 1e-6 to 1, 8 for the number 1.
struct CodeMap {
  float slope[8], offset[8];             // by (e + 7) % 8: a number is fused(m, slope, offset), with the code's sign
  float rate[16], start[16], limit[16];  // by region: m is min(|y| * rate + start, limit), cut off
  float next[16];                        // the smallest |y| of the region after this one
  // By four bits of the exponent, those above its lowest: the region of the smallest |y| that has them, and where the
  // next one begins. Two octaves have the same bits, and decades are wider: one region at most begins in them.
  int32_t lowest[16];
  float border[16];
};

// A smaller |y|, which is in region 0 too, is taken for this one, whose exponent has the four bits 3.
constexpr float kSmallest = 0x1p-25f;

// m of the number 1: with the sign of -1 it is the int8 -128, cut to a byte the uint8 1.
template <bool kSigned>
inline constexpr float kEnd = kSigned ? 128 : 257;

// Every number is made in FP64 and rounded once; plain_codes.py does the same.
template <bool kSigned>
constexpr CodeMap make_code_map() {
  CodeMap map{};
  constexpr double kDecades[8] = {1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};
  for (int region = 1; region < 8; ++region) {
    const double numbers = kSigned ? 1 << (region - 1) : 1 << region;  // in this decade
    const double decade = kDecades[region];
    const int place = (kSigned ? region + 6 : region + 7) % 8;
    map.slope[place] = static_cast<float>(0.9 * decade / numbers);
    map.offset[place] = static_cast<float>((0.45 / numbers - 0.8) * decade);
    map.rate[region] = static_cast<float>(numbers / 0.9 / decade);
    map.start[region] = static_cast<float>(numbers * 8 / 9);
    map.limit[region] = static_cast<float>(2 * numbers - 0.5);
    const double first = 0.1 + 0.45 / numbers, last_below = 0.1 - 0.09 / numbers;
    map.next[region - 1] = static_cast<float>(decade * (region == 1 ? first / 2 : (first + last_below) / 2));
    map.next[7] = static_cast<float>(1 - 0.225 / numbers);
  }
  map.start[8] = map.limit[8] = kEnd<kSigned>;
  for (int region = 8; region < 16; ++region) map.next[region] = 4;  // no |y| is so large
  const int one = kSigned ? 6 : 7;
  map.slope[one] = 0;
  map.offset[one] = 1;
  double low = kSmallest;
  for (int place = 3; place < 16; ++place, low *= 4) {
    int region = 0;
    while (map.next[region] <= low) ++region;
    map.lowest[place] = region;
    map.border[place] = map.next[region];
  }
  return map;
}

template <bool kSigned>
inline constexpr CodeMap kCodeMap = make_code_map<kSigned>();

// The number of a code, before the scale.
template <bool kSigned>
C10_HOST_DEVICE inline float number_of(const CodeMap& map, uint8_t code) {
  if (code == 0) return 0;
  const auto m = static_cast<float>(kSigned ? static_cast<int>(static_cast<int8_t>(code)) : static_cast<int>(code));
  const uint32_t bits = bits_of(m), place = bits >> 23 & 7u, sign = bits & kSignBit;
  return fused(m, map.slope[place], from_bits(bits_of(map.offset[place]) ^ sign));
}

// What numbers of a block are multiplied by, one after the other, to be divided by the scale: the inverse of a number
// beyond 2^126 would be subnormal, which is 0 for a thread that flushes such numbers.
struct Inverse {
  float first, second;

  C10_HOST_DEVICE explicit Inverse(float scale)
      : first(std::fabs(scale) < 4.2535296e37f ? 1.0f : 0.0625f), second(over(1.0f, times(scale, first))) {}
  C10_HOST_DEVICE float of(float x) const { return times(times(x, first), second); }
};

// The code of y, a number over its scale: from -1 to 1. In the signed map 1 itself, which only another element of the
// scale's magnitude is, has the code of the number below it.
template <bool kSigned>
C10_HOST_DEVICE inline uint8_t code_of(const CodeMap& map, float y) {
  const float size = kSigned ? std::fabs(y) : y;
  int region = 0;
  for (int k = 0; k < 8; ++k) region += size >= map.next[k] ? 1 : 0;
  const float m = plus(times(size, map.rate[region]), map.start[region]);
  const int whole = static_cast<int>(m < map.limit[region] ? m : map.limit[region]);
  if (!kSigned) return static_cast<uint8_t>(whole);
  return static_cast<uint8_t>(y < 0 ? -whole : whole < 127 ? whole : 127);
}

// A number's place in the search for a block's largest. Of a signed map: its magnitude in the upper 31 bits, and 1
// below them where it is negative, which decides between two of one magnitude. An unsigned map has no negative numbers:
// they are 0.
template <bool kSigned>
C10_HOST_DEVICE inline uint32_t rank_of(float x) {
  const uint32_t bits = bits_of(x);
  if (kSigned) return bits << 1 | bits >> 31;
  return x < 0 || bits == kSignBit ? 0 : bits & ~kSignBit;
}

// The scale of a block, by the highest rank in it.
template <bool kSigned>
C10_HOST_DEVICE inline float scale_of(uint32_t rank) {
  const uint32_t size = kSigned ? rank >> 1 : rank;
  if (size >= kInfinite) return from_bits(0x7FC00000u);
  if (size < kSmallestNormal) return 0;
  return from_bits(kSigned ? size | ~rank << 31 : size);
}

// Whether the codes of a block with this scale say anything: else all of them are 0.
C10_HOST_DEVICE inline bool has_numbers(float scale) { return scale == scale && scale != 0; }

}  // namespace amp_patch

// Eight bits for a number of an optimizer's state: a code, and for each kBlock elements, in the order of memory, one
// FP32 scale. A code is an FP16 number without its last 7 bits:
//   unsigned (uint8)  E5M3, without FP16's sign: code << 7; the scale is the number 2^15
//   signed (int8)     E4M3, the byte of torch.float8_e4m3fn, without the highest bit of FP16's exponent; the scale is 1
//
// The scale is the largest magnitude of the block, and that element comes back to the bit. The others are rounded to
// the code below or above by the last 7 bits of the scaled FP32 number, which are added where the code is cut off. So
// the mean is the number itself, as with random bits, and no seed is needed. code -> FP32 -> code is exact: the number
// is a few FP32 roundings from a code, FP16 rounds it there, and the bits added do not reach the next code.
//
// A square is never 0 in a block that has numbers: beside a momentum, the step would be that over eps. For the same
// reason a block of squares whose largest is below kLeast has kLeast as its scale, and one whose smallest codes would
// be subnormal (below kUniform) has the largest everywhere. Squares have no sign: a negative number is its magnitude. A
// block of momenta below kLeast is zeros. A block with a NaN, an infinity or a number from kMost on is NaN as a whole:
// its scale is.
#pragma once

#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>

#include "steps.h"

namespace amp_patch {

constexpr int64_t kBlock = 256;

constexpr int64_t blocks_in(int64_t elements) { return (elements + kBlock - 1) / kBlock; }

// The bits of 2^-109, 2^-94, 2^126 and a NaN. Below 2^-109 the scaled scale of squares and the numbers of momenta would
// be subnormal, which is 0 for a thread that flushes such numbers; from 2^126 on, the inverse of a scale.
constexpr uint32_t kLeast = 0x09000000u, kUniform = 0x10800000u, kMost = 0x7E800000u, kNan = 0x7FC00000u;

// The number that the scale is before it is scaled, and its bits in FP16.
template <bool kSigned>
inline constexpr float kTop = kSigned ? 1.0f : 0x1p15f;
constexpr uint16_t kTopOfSquares = 0x7800;

// The scale of a block, by the bits of its largest magnitude.
template <bool kSigned>
C10_HOST_DEVICE inline float scale_of(uint32_t most) {
  if (most >= kMost) return from_bits(kNan);
  if (most >= kLeast) return from_bits(most);
  return kSigned || most == 0 ? 0 : from_bits(kLeast);
}

// Whether the codes of a block with this scale say anything: else all of them are 0.
C10_HOST_DEVICE inline bool has_numbers(float scale) { return scale == scale && scale != 0; }

// The least bits in FP16 of a number in a block with this scale.
template <bool kSigned>
C10_HOST_DEVICE inline uint16_t least_of(float scale) {
  if (kSigned) return 0;
  return bits_of(scale) < kUniform ? kTopOfSquares : 1 << 7;
}

// A code's number; `unit` is the scale over kTop.
template <bool kSigned>
C10_HOST_DEVICE inline float number_of(uint8_t code, float unit) {
  const int bits = kSigned ? static_cast<int8_t>(code) * (1 << 7) & 0xBFFF : code << 7;
  return times(static_cast<float>(c10::Half(static_cast<uint16_t>(bits), c10::Half::from_bits())), unit);
}

// The code of y, a number times kTop over the scale.
template <bool kSigned>
C10_HOST_DEVICE inline uint8_t code_of(float y, int least) {
  const int half = c10::Half(y).x;
  const int size = (half & 0x7FFF) + static_cast<int>(bits_of(y) & 0x7Fu);
  return static_cast<uint8_t>((size < least ? least : size) >> 7 | (kSigned ? half >> 8 & 0x80 : 0));
}

}  // namespace amp_patch

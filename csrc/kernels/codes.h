// Optimizer state in eight bits per number: a code for each number, and one FP32 scale for each block of kBlock numbers
// in the order of memory. A code is an FP16 number without its last 7 bits:
//   unsigned (uint8)  for squares: E5M3, FP16 without its sign; the block's largest magnitude becomes 2^15
//   signed (int8)     for momenta: E4M3, the byte of torch.float8_e4m3fn, FP16 without the highest bit of its exponent;
//                     the block's largest magnitude becomes 1
//
// The scale of a block is its largest magnitude, which is decoded exactly. Every other number is scaled, and rounded to
// the code below or above it. The last 7 bits of the scaled FP32 number are used as random bits: they are added to the
// FP16 bits before the last 7 of these are cut off. So the mean of decoded numbers is right, and no seed is needed.
// Decoding and encoding again gives the same code: the scaled number is then a few FP32 roundings from the code's FP16
// number, FP16 rounds it to that, and the added bits do not reach the next code.
//
// In a block that is not all zeros, no square is decoded as 0: the step would divide its momentum by eps alone. For the
// same reason a block of squares whose largest is below kLeast has kLeast as its scale, and if the smallest codes of a
// block would be subnormal (scale below kUniform), all its codes are the largest. A negative square is encoded as its
// magnitude. A block of momenta whose largest is below kLeast is decoded as zeros. If a block has a NaN, an infinity or
// a magnitude of kMost or more, its scale is NaN, so all its numbers are decoded as NaN.
#pragma once

#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>

#include "steps.h"

namespace amp_patch {

constexpr int64_t kBlock = 256;

constexpr int64_t blocks_in(int64_t elements) { return (elements + kBlock - 1) / kBlock; }

// As FP32 bits: 2^-109, 2^-94, 2^126 and a NaN. With a scale below 2^-109, `unit` of squares and decoded momenta would
// be subnormal. With a scale of 2^126 or more, its inverse would be. A thread may flush subnormal numbers to 0.
constexpr uint32_t kLeast = 0x09000000u, kUniform = 0x10800000u, kMost = 0x7E800000u, kNan = 0x7FC00000u;

// The number that a block's largest magnitude is scaled to, and for squares its FP16 bits.
template <bool kSigned>
inline constexpr float kTop = kSigned ? 1.0f : 0x1p15f;
constexpr uint16_t kTopOfSquares = 0x7800;

// The scale of a block whose largest magnitude has the FP32 bits `most`.
template <bool kSigned>
C10_HOST_DEVICE inline float scale_of(uint32_t most) {
  if (most >= kMost) return from_bits(kNan);
  if (most >= kLeast) return from_bits(most);
  return kSigned || most == 0 ? 0 : from_bits(kLeast);
}

// Whether a block with this scale has codes. If its scale is 0 or NaN, all codes are 0.
C10_HOST_DEVICE inline bool has_numbers(float scale) { return scale == scale && scale != 0; }

// The floor of `code_of`: it raises the FP16 bits of a smaller magnitude to this. For squares these are the bits of
// code 1, so that no code decodes as 0, or of the top code if the scale is below kUniform. Momenta have no floor: 0.
template <bool kSigned>
C10_HOST_DEVICE inline uint16_t least_of(float scale) {
  if (kSigned) return 0;
  return bits_of(scale) < kUniform ? kTopOfSquares : 1 << 7;
}

// The FP32 number that a code decodes to. `unit`: the block's scale / kTop.
template <bool kSigned>
C10_HOST_DEVICE inline float number_of(uint8_t code, float unit) {
  const int bits = kSigned ? static_cast<int8_t>(code) * (1 << 7) & 0xBFFF : code << 7;
  return times(static_cast<float>(c10::Half(static_cast<uint16_t>(bits), c10::Half::from_bits())), unit);
}

// The code of y, a number of the block times kTop / scale. `least`: the block's least_of.
template <bool kSigned>
C10_HOST_DEVICE inline uint8_t code_of(float y, int least) {
  const int half = c10::Half(y).x;
  const int size = (half & 0x7FFF) + static_cast<int>(bits_of(y) & 0x7Fu);
  return static_cast<uint8_t>((size < least ? least : size) >> 7 | (kSigned ? half >> 8 & 0x80 : 0));
}

}  // namespace amp_patch

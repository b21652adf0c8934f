// Optimizer state and activations in eight bits per number: a code for each number, and one FP32 scale for each block
// of kBlock numbers in the order of memory. A code is an FP16 number without its last 7 bits:
//   unsigned (uint8)  for squares: E5M3, FP16 without its sign; the block's largest magnitude becomes 2^15
//   signed (int8)     for momenta: E4M3, the byte of torch.float8_e4m3fn, FP16 without the highest bit of its exponent;
//                     the block's largest magnitude becomes 1
//   kept (float8)     for activations: as momenta, but no number other than 0 becomes 0, so that the backward of a ReLU
//                     sees the zeros of its forward; code 0x7F is infinite, so that additive masks are exact
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
// magnitude. The scale of activations has the same floor, also in a block of zeros, so that their signs are in the
// codes. A block of momenta whose largest is below kLeast is decoded as zeros. If a block has a NaN, an infinity or a
// magnitude of kMost or more, its scale is NaN, so all its numbers are decoded as NaN. A block of activations has a NaN
// scale only if it has a NaN: the scale is the largest magnitude below kMost, and larger ones become infinite.
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
constexpr uint32_t kInfinite = 0x7F800000u;
constexpr uint16_t kInfiniteCode = 0x7F;

enum class Codes { kSigned, kUnsigned, kKept };

// The number that a block's largest magnitude is scaled to, and for squares its FP16 bits.
template <Codes kCodes>
inline constexpr float kTop = kCodes == Codes::kUnsigned ? 0x1p15f : 1.0f;
constexpr uint16_t kTopOfSquares = 0x7800;

// The FP32 bits of a magnitude, as the largest of a block is found. Those of activations that become infinite are the
// smallest but 0.
template <Codes kCodes>
C10_HOST_DEVICE inline uint32_t counted(uint32_t size) {
  return kCodes == Codes::kKept && size >= kMost && size <= kInfinite ? 1 : size;
}

// The scale of a block whose largest magnitude has the FP32 bits `most`.
template <Codes kCodes>
C10_HOST_DEVICE inline float scale_of(uint32_t most) {
  if (most >= kMost) return from_bits(kNan);
  if (most >= kLeast) return from_bits(most);
  if (kCodes == Codes::kKept) return from_bits(kLeast);
  return kCodes == Codes::kSigned || most == 0 ? 0 : from_bits(kLeast);
}

// Whether a block with this scale has codes. If its scale is 0 or NaN, all codes are 0.
C10_HOST_DEVICE inline bool has_numbers(float scale) { return scale == scale && scale != 0; }

// The floor of `code_of`: it raises the FP16 bits of a smaller magnitude to this. For squares these are the bits of
// code 1, so that no code decodes as 0, or of the top code if the scale is below kUniform. Momenta have no floor: 0.
// Activations have the floor of code 1 for all numbers but 0.
template <Codes kCodes>
C10_HOST_DEVICE inline uint16_t least_of(float scale) {
  if (kCodes == Codes::kSigned) return 0;
  if (kCodes == Codes::kKept) return 1 << 7;
  return bits_of(scale) < kUniform ? kTopOfSquares : 1 << 7;
}

// The FP32 number that a code decodes to. `unit`: the block's scale / kTop.
template <Codes kCodes>
C10_HOST_DEVICE inline float number_of(uint8_t code, float unit) {
  int bits = kCodes != Codes::kUnsigned ? static_cast<int8_t>(code) * (1 << 7) & 0xBFFF : code << 7;
  if (kCodes == Codes::kKept && (code & kInfiniteCode) == kInfiniteCode) bits = (bits & 0x8000) | 0x7C00;
  return times(static_cast<float>(c10::Half(static_cast<uint16_t>(bits), c10::Half::from_bits())), unit);
}

// The code of x, a number of the block; inverse: kTop / scale. `least`: the block's least_of.
template <Codes kCodes>
C10_HOST_DEVICE inline uint8_t code_of(float x, float inverse, int least) {
  if (kCodes == Codes::kKept && (bits_of(x) & 0x7FFFFFFFu) == 0) least = 0;
  const float y = times(x, inverse);
  const int half = c10::Half(y).x;
  const int size = (half & 0x7FFF) + static_cast<int>(bits_of(y) & 0x7Fu);
  int code = (size < least ? least : size) >> 7;
  if (kCodes == Codes::kKept && code > kInfiniteCode) code = kInfiniteCode;
  return static_cast<uint8_t>(code | (kCodes != Codes::kUnsigned ? half >> 8 & 0x80 : 0));
}

}  // namespace amp_patch

// Random bits by a counter: Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2,
// 3" (SC 2011), with the constants of that paper. The bits of an element depend only on the seed, the draw and the
// element's index in its tensor's memory: so they are the same on any device, in any number of threads, and in a
// replay.
#pragma once

#include <cstdint>

#include "functors.h"

namespace amp_patch {

constexpr int kDrawn = 8;  // elements per counter, 16 bits each

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxFactors[2] = {0xD2511F53u, 0xCD9E8D57u}, kPhiloxKeys[2] = {0x9E3779B9u, 0xBB67AE85u};

// The bits of group `group` of a tensor's elements: element 2 * w of it has the low half of words[w], element 2 * w + 1
// the high half. On the CPU `fill_random` of step_vectors.h computes the same bits in vector registers.
AMP_PATCH_ELEMENT void random_words(uint64_t seed, uint64_t draw, uint64_t group, uint32_t (&words)[4]) {
  constexpr uint32_t kFactor0 = kPhiloxFactors[0], kFactor1 = kPhiloxFactors[1];
  constexpr uint32_t kKey0 = kPhiloxKeys[0], kKey1 = kPhiloxKeys[1];
  uint32_t c0 = static_cast<uint32_t>(group), c1 = static_cast<uint32_t>(group >> 32);
  uint32_t c2 = static_cast<uint32_t>(draw), c3 = static_cast<uint32_t>(draw >> 32);
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t first = uint64_t{kFactor0} * c0, second = uint64_t{kFactor1} * c2;
    c0 = static_cast<uint32_t>(second >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(second);
    c2 = static_cast<uint32_t>(first >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(first);
    key0 += kKey0;
    key1 += kKey1;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

}  // namespace amp_patch

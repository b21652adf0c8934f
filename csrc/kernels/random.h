// Random bits by a counter: Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2,
// 3" (SC 2011), with the constants of that paper. The bits of an element depend on the seed, the draw and the element's
// place in its tensor's memory alone: so they are the same on any device, in any number of threads, and at a replay.
#pragma once

#include <cstdint>

#include "functors.h"

namespace amp_patch {

constexpr int kDrawn = 8;  // elements that one counter serves, 16 bits for each

// L counters at once, each of four words: c[word][lane] become random words.
template <int L>
AMP_PATCH_ELEMENT void philox(uint32_t (&c)[4][L], uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    for (int l = 0; l < L; ++l) {
      const uint64_t first = uint64_t{0xD2511F53u} * c[0][l], second = uint64_t{0xCD9E8D57u} * c[2][l];
      const uint32_t c1 = c[1][l], c3 = c[3][l];
      c[0][l] = static_cast<uint32_t>(second >> 32) ^ c1 ^ key0;
      c[1][l] = static_cast<uint32_t>(second);
      c[2][l] = static_cast<uint32_t>(first >> 32) ^ c3 ^ key1;
      c[3][l] = static_cast<uint32_t>(first);
    }
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

// The bits of L groups of kDrawn elements, from group `first` of a tensor on: element 2 * w of a group has the low half
// of words[w], element 2 * w + 1 the high half.
template <int L>
AMP_PATCH_ELEMENT void random_words(uint64_t seed, uint64_t draw, uint64_t first, uint32_t (&words)[4][L]) {
  for (int l = 0; l < L; ++l) {
    words[0][l] = static_cast<uint32_t>(first + l);
    words[1][l] = static_cast<uint32_t>((first + l) >> 32);
    words[2][l] = static_cast<uint32_t>(draw);
    words[3][l] = static_cast<uint32_t>(draw >> 32);
  }
  philox<L>(words, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

}  // namespace amp_patch

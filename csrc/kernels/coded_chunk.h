// One chunk of one parameter whose states are codes (codes.h): the work of each thread of a CUDA block. As in
// step_chunk.h, nothing here calls CUDA.
//
// A thread has kOwn elements of a block of kBlock elements, so a warp has the whole block: two packs of four for each
// thread, or eight single elements where the tensors are not aligned or the block is not full. The threads find the
// block's largest magnitude with most(own), which returns the largest `own` of the warp to each of them, so each of
// them must call it equally often. No thread waits for another warp.
#pragma once

#include "codes.h"
#include "step_chunk.h"

namespace amp_patch {

constexpr int kOwn = kBlock / 32;

constexpr c10::ScalarType kActivation = c10::ScalarType::Float8_e4m3fn;

// A row with the scales of its states; null if a state is FP32.
struct CodedBlocks : StepBlocks {
  static constexpr int kResident = 3;  // with the registers of four, twice as many bytes would be spilled

  float* scales[kPlaces - kState];

  // `from` is the first element of a chunk, and a chunk has whole blocks of codes.
  void begin_at(int64_t from) {
    StepBlocks::begin_at(from);
    for (float*& own : scales) {
      if (own != nullptr) own += from / kBlock;
    }
  }
};

inline std::vector<CodedBlocks> coded_blocks_of(const std::vector<StepRow>& rows,
                                                const std::vector<StepScales>& scales) {
  std::vector<CodedBlocks> blocks;
  blocks.reserve(rows.size());
  for (const StepBlocks& row : blocks_of(rows)) {
    blocks.push_back({row, {}});
    std::copy(scales[row.index].begin(), scales[row.index].end(), blocks.back().scales);
  }
  return blocks;
}

// Reads pack `at` of state s, which is codes or FP32. kKept: the codes may be those of activations, which no step has.
template <bool kKept, int V>
C10_HOST_DEVICE inline Pack<float, V> read_state(const CodedBlocks& row, int s, int64_t at) {
  if (row.scales[s] == nullptr) return read_pack<float, V>(row, kState + s, at);
  const auto codes = read_pack<uint8_t, V>(row, kState + s, at);
  const bool is_signed = row.dtype[kState + s] != c10::ScalarType::Byte;
  const float scale = *global(row.scales[s] + at * V / kBlock);
  constexpr float kOfSigned = 1 / kTop<Codes::kSigned>, kOfSquares = 1 / kTop<Codes::kUnsigned>;
  const float unit = times(scale, is_signed ? kOfSigned : kOfSquares);  // powers of two: as a division
  Pack<float, V> values;
  AMP_PATCH_UNROLL
  for (int v = 0; v < V; ++v) {
    const uint8_t code = codes.element[v];
    values.element[v] = is_signed ? number_of<Codes::kSigned>(code, unit) : number_of<Codes::kUnsigned>(code, unit);
    if (kKept && row.dtype[kState + s] == kActivation) values.element[v] = number_of<Codes::kKept>(code, unit);
  }
  return values;
}

// The codes of a pack of a block with this scale.
template <Codes kCodes, int V>
C10_HOST_DEVICE inline Pack<uint8_t, V> codes_of(const Pack<float, V>& values, float scale) {
  Pack<uint8_t, V> codes{};
  if (!has_numbers(scale)) return codes;
  const float inverse = over(kTop<kCodes>, scale);
  const int least = least_of<kCodes>(scale);
  AMP_PATCH_UNROLL
  for (int v = 0; v < V; ++v) codes.element[v] = code_of<kCodes>(values.element[v], inverse, least);
  return codes;
}

// Whether pack p of a thread is one of its `live` packs. Of packs of several elements, all are or none is.
template <int V>
C10_HOST_DEVICE inline bool is_live(int p, int live) {
  return V > 1 ? live > 0 : p < live;
}

// Writes the first `live` of P packs of state s from pack `at` on, as codes or FP32. The values of the others are 0.
// kKept: the codes may be those of activations.
template <bool kKept, int V, int P, class Most>
C10_HOST_DEVICE inline void write_state(const CodedBlocks& row, int s, int64_t at, int live,
                                        const Pack<float, V> (&values)[P], const Most& most) {
  if (row.scales[s] == nullptr) {
    AMP_PATCH_UNROLL
    for (int p = 0; p < P; ++p) {
      if (is_live<V>(p, live)) write_pack(row, kState + s, at + p, values[p]);
    }
    return;
  }
  const bool is_kept = kKept && row.dtype[kState + s] == kActivation;
  uint32_t own = 0;
  AMP_PATCH_UNROLL
  for (int p = 0; p < P; ++p) {
    AMP_PATCH_UNROLL
    for (int v = 0; v < V; ++v) {
      const uint32_t bits = bits_of(values[p].element[v]) & 0x7FFFFFFFu;
      const uint32_t magnitude = is_kept ? counted<Codes::kKept>(bits) : bits;
      own = own < magnitude ? magnitude : own;
    }
  }
  const uint32_t largest = most(own);
  if (live == 0) return;
  const bool is_signed = row.dtype[kState + s] == c10::ScalarType::Char;
  float scale = is_signed ? scale_of<Codes::kSigned>(largest) : scale_of<Codes::kUnsigned>(largest);
  if (is_kept) scale = scale_of<Codes::kKept>(largest);
  AMP_PATCH_UNROLL
  for (int p = 0; p < P; ++p) {
    if (!is_live<V>(p, live)) break;
    const auto codes = [&] {
      if (is_kept) return codes_of<Codes::kKept>(values[p], scale);
      return is_signed ? codes_of<Codes::kSigned>(values[p], scale) : codes_of<Codes::kUnsigned>(values[p], scale);
    };
    write_pack(row, kState + s, at + p, codes());
  }
  if (at * V % kBlock == 0) *global(row.scales[s] + at * V / kBlock) = scale;  // by the block's first thread
}

// The work of a thread: run<V, P>(row, at, live, most) does the first `live` of P packs from pack `at` on. This is an
// optimizer's step; EncodeWork and DecodeWork convert values, which are at kGrad, to codes and back.
template <class F>
struct CodedStepWork : StepWork<F, true> {
  template <int V, int P, class Most>
  C10_HOST_DEVICE void run(const CodedBlocks& row, int64_t at, int live, const Most& most) const {
    // Packs of four are read before the first is stepped, so that more bytes are in flight.
    constexpr int kAtOnce = V > 1 ? P : 1;
    Pack<float, V> states[P][F::kStates] = {};
    AMP_PATCH_UNROLL
    for (int first = 0; first < P; first += kAtOnce) {
      if (first >= live) break;
      Bits<float, V> grads[kAtOnce];
      MasterBits<V> masters[kAtOnce];
      AMP_PATCH_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        grads[i] = read_bits<V>(row, kGrad, at + first + i);
        masters[i] = read_masters<V>(row, at + first + i);
        AMP_PATCH_UNROLL
        for (int s = 0; s < F::kStates; ++s) states[first + i][s] = read_state<false, V>(row, s, at + first + i);
      }
      AMP_PATCH_UNROLL
      for (int i = 0; i < kAtOnce; ++i) this->step_pack(row, at + first + i, grads[i], masters[i], states[first + i]);
    }
    AMP_PATCH_UNROLL
    for (int s = 0; s < F::kStates; ++s) {
      Pack<float, V> values[P];
      AMP_PATCH_UNROLL
      for (int p = 0; p < P; ++p) values[p] = states[p][s];
      write_state<false>(row, s, at, live, values, most);
    }
  }
};
struct EncodeWork {
  template <int V, int P, class Most>
  C10_HOST_DEVICE void run(const CodedBlocks& row, int64_t at, int live, const Most& most) const {
    Pack<float, V> values[P] = {};
    AMP_PATCH_UNROLL
    for (int p = 0; p < P; ++p) {
      if (!is_live<V>(p, live)) continue;
      const Bits<float, V> bits = read_bits<V>(row, kGrad, at + p);
      with_element<float, V>(row.dtype[kGrad], [&](auto element) {
        const auto pack = bits.template as<decltype(element)>();
        AMP_PATCH_UNROLL
        for (int v = 0; v < V; ++v) values[p].element[v] = static_cast<float>(pack.element[v]);
      });
    }
    write_state<true>(row, 0, at, live, values, most);
  }
};
struct DecodeWork {
  template <int V, int P, class Most>
  C10_HOST_DEVICE void run(const CodedBlocks& row, int64_t at, int live, const Most&) const {
    AMP_PATCH_UNROLL
    for (int p = 0; p < P; ++p) {
      if (!is_live<V>(p, live)) continue;
      const Pack<float, V> values = read_state<true, V>(row, 0, at + p);
      with_element<float, V>(row.dtype[kGrad], [&](auto element) {
        Pack<decltype(element), V> pack;
        AMP_PATCH_UNROLL
        for (int v = 0; v < V; ++v) pack.element[v] = static_cast<decltype(element)>(values.element[v]);
        write_pack(row, kGrad, at + p, pack);
      });
    }
  }
};

// Does `work` on the packs of one thread of block `block` in a launch; `found` is the block's row. The number of calls
// of `run` is the same for all threads.
template <class Work, class Most>
C10_HOST_DEVICE inline void run_coded_chunk(const Work& work, const CodedBlocks& found, int chunk, uint32_t block,
                                            int thread, const Most& most) {
  const CodedBlocks row = found;  // a copy in registers: the compiler would reload it after each store
  const int64_t begin = static_cast<int64_t>(block - row.first) * chunk, left = row.size - begin;
  const int length = left < chunk ? static_cast<int>(left) : chunk;
  // A tensor that is not aligned for packs of four is done in single elements, and so is the last block.
  const int done = row.width == 4 ? length / static_cast<int>(kBlock) * static_cast<int>(kBlock) : 0;
  for (int own = kOwn * thread; own - kOwn * thread < done; own += kOwn * kThreads) {
    work.template run<4, 2>(row, (begin + own) / 4, own < done ? 2 : 0, most);
  }
  for (int own = done + kOwn * thread; own - kOwn * thread < length; own += kOwn * kThreads) {
    const int rest = length - own;
    work.template run<1, kOwn>(row, begin + own, rest < 0 ? 0 : rest < kOwn ? rest : kOwn, most);
  }
}

}  // namespace amp_patch

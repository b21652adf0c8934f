// One chunk of one parameter whose states are codes (codes.h): the work of each thread of a CUDA block. As in
// step_chunk.h, nothing here calls CUDA.
//
// A thread has P packs of V elements of a block of kBlock elements, so the kBlock / (P * V) threads beside each other
// have the whole block: a warp, if P is 2 and V is 4. They find the block's largest magnitude with
// most(own, kBlock / (P * V)), which returns the largest `own` of these threads to each of them. `most` waits for all
// threads of the warp, and for more than 32 for all of the CUDA block, so each of them must call it equally often.
#pragma once

#include "codes.h"
#include "step_chunk.h"

namespace amp_patch {

static_assert(kThreads % kBlock == 0, "the threads of a CUDA block have whole blocks of codes");

constexpr c10::ScalarType kActivation = c10::ScalarType::Float8_e4m3fn;

// A row with the scales of its states; null if a state is FP32.
struct CodedBlocks : StepBlocks {
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

// Pack `at` of the codes of state s.
template <int V>
C10_HOST_DEVICE inline Pack<uint8_t, V>* code_pack(const CodedBlocks& row, int s, int64_t at) {
  return reinterpret_cast<Pack<uint8_t, V>*>(global(static_cast<uint8_t*>(row.data[kState + s]) + at * V));
}

// Reads pack `at` of state s, which is codes or FP32. kKept: the codes may be those of activations, which no step has.
template <bool kKept, int V>
C10_HOST_DEVICE inline Pack<float, V> read_state(const CodedBlocks& row, int s, int64_t at) {
  const void* const data = row.data[kState + s];
  if (row.scales[s] == nullptr) return *global(static_cast<const Pack<float, V>*>(data) + at);
  const Pack<uint8_t, V> codes = *code_pack<V>(row, s, at);
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

// Writes P packs of state s from pack `at` on, as codes or FP32. If `live` is false, the thread has no elements, and
// `values` are 0. kKept: the codes may be those of activations.
template <bool kKept, int V, int P, class Most>
C10_HOST_DEVICE inline void write_state(const CodedBlocks& row, int s, int64_t at, bool live,
                                        const Pack<float, V> (&values)[P], const Most& most) {
  if (row.scales[s] == nullptr) {
    AMP_PATCH_UNROLL
    for (int p = 0; p < P; ++p) {
      if (live) write_pack(row, kState + s, at + p, values[p]);
    }
    return;
  }
  const c10::ScalarType dtype = row.dtype[kState + s];
  const bool is_kept = kKept && dtype == kActivation;
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
  const uint32_t largest = most(own, static_cast<int>(kBlock / (P * V)));
  if (!live) return;
  const auto write = [&](auto codes) {
    constexpr Codes kCodes = decltype(codes)::value;
    const float scale = scale_of<kCodes>(largest);
    AMP_PATCH_UNROLL
    for (int p = 0; p < P; ++p) *code_pack<V>(row, s, at + p) = codes_of<kCodes>(values[p], scale);
    if (at * V % kBlock == 0) *global(row.scales[s] + at * V / kBlock) = scale;  // by the block's first thread
  };
  if (dtype == c10::ScalarType::Char) return write(std::integral_constant<Codes, Codes::kSigned>());
  if (dtype == c10::ScalarType::Byte) return write(std::integral_constant<Codes, Codes::kUnsigned>());
  if constexpr (kKept) write(std::integral_constant<Codes, Codes::kKept>());
}

// The work of a thread: run<V, P>(row, at, live, most) does P packs from pack `at` on if `live` is true, and else only
// calls `most`. This is an optimizer's step; EncodeWork and DecodeWork convert FP32 values, which are at kGrad, to
// codes and back. All packs are read before the first is stepped, so that more bytes are in flight.
template <class F>
struct CodedStepWork : StepWork<F, true> {
  template <int V, int P, class Most>
  C10_HOST_DEVICE void run(const CodedBlocks& row, int64_t at, bool live, const Most& most) const {
    Pack<float, V> states[P][F::kStates] = {};
    if (live) {
      Bits<float, V> grads[P];
      MasterBits<V> masters[P];
      AMP_PATCH_UNROLL
      for (int p = 0; p < P; ++p) {
        grads[p] = read_bits<V>(row, kGrad, at + p);
        masters[p] = read_masters<V>(row, at + p);
        AMP_PATCH_UNROLL
        for (int s = 0; s < F::kStates; ++s) states[p][s] = read_state<false, V>(row, s, at + p);
      }
      AMP_PATCH_UNROLL
      for (int p = 0; p < P; ++p) this->step_pack(row, at + p, grads[p], masters[p], states[p]);
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
  C10_HOST_DEVICE void run(const CodedBlocks& row, int64_t at, bool live, const Most& most) const {
    Pack<float, V> values[P] = {};
    AMP_PATCH_UNROLL
    for (int p = 0; p < P; ++p) {
      if (!live) continue;
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
  C10_HOST_DEVICE void run(const CodedBlocks& row, int64_t at, bool live, const Most&) const {
    AMP_PATCH_UNROLL
    for (int p = 0; p < P; ++p) {
      if (!live) continue;
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
  int done = 0;
  if (row.width == 4) {  // whole blocks of codes; the elements of the last block are done one by one
    done = length / static_cast<int>(kBlock) * static_cast<int>(kBlock);
    for (int from = 0; from < done; from += 8 * kThreads) {
      const int own = from + 8 * thread;
      work.template run<4, 2>(row, (begin + own) / 4, own < done, most);
    }
  }
  for (int from = done; from < length; from += kThreads) {
    work.template run<1, 1>(row, begin + from + thread, from + thread < length, most);
  }
}

}  // namespace amp_patch

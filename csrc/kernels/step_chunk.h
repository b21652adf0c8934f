// One chunk of one parameter in an optimizer's step: the work of each thread of a block. As in chunk.h, nothing here
// calls CUDA, so that the tests (emulate.cpp) run the same code on the host.
#pragma once

#include "chunk.h"
#include "random.h"
#include "step_rows.h"

namespace amp_patch {

// A StepRow in a launch.
struct StepBlocks : StepRow {
  static constexpr int kResident = 4;    // as Row's
  static constexpr bool kPacked = true;  // Loose: false

  uint32_t first;  // the index, in the launch, of the block that begins this row
  int32_t index;   // its place in the lists
  int64_t before;  // elements before this row, in its tensor
  uint8_t width;   // elements of one memory access: 4, or 1 if the tensors are not aligned for 4
  bool begins;     // the first row of its tensor, which counts the tensor's step

  void begin_at(int64_t from) {
    for (int k = 0; k < kPlaces; ++k) {
      if (data[k] != nullptr) {
        data[k] = static_cast<char*>(data[k]) + from * static_cast<int64_t>(c10::elementSize(dtype[k]));
      }
    }
    size -= from;
    before += from;
    begins = from == 0;
  }
};

// A row of width 1. Its packs are read and written one element at a time.
template <class Blocks>
struct Loose : Blocks {
  static constexpr bool kPacked = false;
};

inline StepBlocks step_blocks(const StepRow& row, int64_t index) {
  StepBlocks blocks{row, 0, static_cast<int32_t>(index), 0, 4, true};
  for (int k = 0; k < kPlaces; ++k) {
    const bool aligned =
        row.data[k] == nullptr || reinterpret_cast<uintptr_t>(row.data[k]) % (4 * c10::elementSize(row.dtype[k])) == 0;
    if (!aligned) blocks.width = 1;
  }
  return blocks;
}

// The rows of a job that have elements, for a launch. If `empty` is true: the rows without elements, each as a row of
// one element, for a launch that counts their steps.
inline std::vector<StepBlocks> blocks_of(const std::vector<StepRow>& rows, bool empty = false) {
  std::vector<StepBlocks> blocks;
  blocks.reserve(empty ? 0 : rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    if ((rows[i].size == 0) != empty) continue;
    blocks.push_back(step_blocks(rows[i], static_cast<int64_t>(i)));
    if (empty) blocks.back().size = 1;
  }
  return blocks;
}

// Pack `at` of the tensor at `place`.
template <class E, int V, class R>
C10_HOST_DEVICE inline Pack<E, V> read_pack(const R& row, int place, int64_t at) {
  const E* const from = global(static_cast<const E*>(row.data[place]) + at * V);
  if constexpr (R::kPacked) {
    return *reinterpret_cast<const Pack<E, V>*>(from);
  } else {
    Pack<E, V> pack;
    AMP_PATCH_UNROLL
    for (int v = 0; v < V; ++v) pack.element[v] = from[v];
    return pack;
  }
}
template <class E, int V, class R>
C10_HOST_DEVICE inline void write_pack(const R& row, int place, int64_t at, const Pack<E, V>& pack) {
  E* const to = global(static_cast<E*>(row.data[place]) + at * V);
  if constexpr (R::kPacked) {
    *reinterpret_cast<Pack<E, V>*>(to) = pack;
  } else {
    AMP_PATCH_UNROLL
    for (int v = 0; v < V; ++v) to[v] = pack.element[v];
  }
}
// Pack `at` of the tensor at `place`, as bits.
template <int V, class R>
C10_HOST_DEVICE inline Bits<float, V> read_bits(const R& row, int place, int64_t at) {
  Bits<float, V> bits;
  with_size<float, V>(row.dtype[place], [&](auto element) {
    using E = decltype(element);
    if constexpr (R::kPacked) {
      bits.template read<E>(row.data[place], at);
    } else {
      const auto pack = read_pack<E, V>(row, place, at);
      std::memcpy(bits.word, &pack, sizeof(pack));
    }
  });
  return bits;
}

// The stored bits of a pack of masters: a split master's low half and weight, or an FP32 master and its weight.
template <int V>
struct MasterBits {
  Bits<float, V> param, weight;
};

template <int V, class R>
C10_HOST_DEVICE inline MasterBits<V> read_masters(const R& row, int64_t at) {
  MasterBits<V> bits;
  bits.param = read_bits<V>(row, kParam, at);
  if (row.data[kWeight] != nullptr) bits.weight = read_bits<V>(row, kWeight, at);
  return bits;
}

// Returns the FP32 values to step: split masters are joined from weight and low half. Other masters are as stored, or
// have the weight's value if user code has written it. kRounds: whether some weights may have no master (stochastic
// rounding); these are read themselves. If it is false, that code and its registers are left out.
template <int V, bool kRounds>
C10_HOST_DEVICE inline Pack<float, V> join_masters(const StepRow& row, const MasterBits<V>& bits) {
  if (row.dtype[kParam] == c10::ScalarType::Short) {
    const auto halves = bits.param.template as<int16_t>();
    const auto weights = bits.weight.template as<c10::BFloat16>();
    Pack<float, V> p;
    AMP_PATCH_UNROLL
    for (int v = 0; v < V; ++v) p.element[v] = join(weights.element[v], halves.element[v]);
    return p;
  }
  if (kRounds && row.dtype[kParam] == c10::ScalarType::BFloat16) {
    const auto weights = bits.param.template as<c10::BFloat16>();
    Pack<float, V> p;
    AMP_PATCH_UNROLL
    for (int v = 0; v < V; ++v) p.element[v] = static_cast<float>(weights.element[v]);
    return p;
  }
  auto p = bits.param.template as<float>();
  if (row.data[kWeight] == nullptr) return p;
  with_element<float, V>(row.dtype[kWeight], [&](auto element) {
    using E = decltype(element);
    const auto weights = bits.weight.template as<E>();
    AMP_PATCH_UNROLL
    for (int v = 0; v < V; ++v) {
      float& master = p.element[v];
      const auto weight = static_cast<float>(weights.element[v]);
      if (!(static_cast<float>(static_cast<E>(master)) == weight)) master = weight;
    }
  });
  return p;
}

// The random bits of the elements of pack `at`, which are in one group.
template <int V>
C10_HOST_DEVICE inline Pack<uint16_t, V> random_pack(const StepBlocks& row, uint64_t seed, int64_t at) {
  static_assert(kDrawn % V == 0, "packs begin at multiples of V, as chunks do");
  const int64_t element = row.before + at * V;
  const int within = static_cast<int>(element % kDrawn);
  uint32_t words[4];
  random_words(seed, row.draw, static_cast<uint64_t>(element / kDrawn), words);
  const uint32_t first = words[0], second = words[1], third = words[2], fourth = words[3];
  Pack<uint16_t, V> bits;
  AMP_PATCH_UNROLL
  for (int v = 0; v < V; ++v) {
    const int place = (within + v) / 2;  // chosen by values: a run-time index would put the words into local memory
    const uint32_t even = (place & 2) != 0 ? third : first, odd = (place & 2) != 0 ? fourth : second;
    bits.element[v] = static_cast<uint16_t>(((place & 1) != 0 ? odd : even) >> 16 * ((within + v) % 2));
  }
  return bits;
}

template <int V, bool kRounds, class R>
C10_HOST_DEVICE inline void write_masters(const R& row, uint64_t seed, int64_t at, const Pack<float, V>& p) {
  if (kRounds && row.dtype[kParam] == c10::ScalarType::BFloat16) {
    const Pack<uint16_t, V> random = random_pack<V>(row, seed, at);
    Pack<c10::BFloat16, V> weights;
    AMP_PATCH_UNROLL
    for (int v = 0; v < V; ++v) weights.element[v] = round_stochastically(p.element[v], random.element[v]);
    write_pack(row, kParam, at, weights);
    return;
  }
  if (row.dtype[kParam] == c10::ScalarType::Short) {
    Pack<int16_t, V> halves;
    Pack<c10::BFloat16, V> weights;
    AMP_PATCH_UNROLL
    for (int v = 0; v < V; ++v) split(p.element[v], weights.element[v], halves.element[v]);
    write_pack(row, kParam, at, halves);
    write_pack(row, kWeight, at, weights);
    return;
  }
  write_pack(row, kParam, at, p);
  if (row.data[kWeight] == nullptr) return;
  with_element<float, V>(row.dtype[kWeight], [&](auto element) {
    using E = decltype(element);
    Pack<E, V> weights;
    AMP_PATCH_UNROLL
    for (int v = 0; v < V; ++v) weights.element[v] = static_cast<E>(p.element[v]);
    write_pack(row, kWeight, at, weights);
  });
}

// The work of a thread on packs of V elements: run<V>(row, at) does pack `at`. This is an optimizer's step; StoreWork
// and JoinWork convert the storage of masters.
template <class F, bool kRounds>
struct StepWork {
  F f;
  typename F::Rates rates;
  uint64_t seed;

  template <int V, class R>
  C10_HOST_DEVICE void run(const R& row, int64_t at) const {
    constexpr int S = F::kStates;
    // Issue all loads before the first use: otherwise each would wait for memory separately.
    const Bits<float, V> grads = read_bits<V>(row, kGrad, at);
    Pack<float, V> states[S + 1];
    AMP_PATCH_UNROLL
    for (int s = 0; s < S; ++s) states[s] = read_pack<float, V>(row, kState + s, at);
    step_pack(row, at, grads, read_masters<V>(row, at), states);
    AMP_PATCH_UNROLL
    for (int s = 0; s < S; ++s) write_pack(row, kState + s, at, states[s]);
  }

  // Steps loaded packs, and writes the masters.
  template <int V, int kPacks, class R>
  C10_HOST_DEVICE void step_pack(const R& row, int64_t at, const Bits<float, V>& grads, const MasterBits<V>& masters,
                                 Pack<float, V> (&states)[kPacks]) const {
    constexpr int S = F::kStates;
    Pack<float, V> g;
    with_element<float, V>(row.dtype[kGrad], [&](auto element) {
      const auto pack = grads.template as<decltype(element)>();
      AMP_PATCH_UNROLL
      for (int v = 0; v < V; ++v) g.element[v] = static_cast<float>(pack.element[v]);
    });
    Pack<float, V> p = join_masters<V, kRounds>(row, masters);
    AMP_PATCH_UNROLL
    for (int v = 0; v < V; ++v) {
      float own[S + 1];
      AMP_PATCH_UNROLL
      for (int s = 0; s < S; ++s) own[s] = states[s].element[v];
      f.template step<false>(rates, g.element[v], p.element[v], own);
      AMP_PATCH_UNROLL
      for (int s = 0; s < S; ++s) states[s].element[v] = own[s];
    }
    write_masters<V, kRounds>(row, seed, at, p);
  }
};

// StoreWork converts FP32 masters, which are at kGrad, to split masters or stochastically rounded weights. JoinWork
// converts split masters to FP32.
template <bool kRounds>
struct StoreWork {
  uint64_t seed;

  template <int V, class R>
  C10_HOST_DEVICE void run(const R& row, int64_t at) const {
    write_masters<V, kRounds>(row, seed, at, read_bits<V>(row, kGrad, at).template as<float>());
  }
};
struct JoinWork {
  template <int V, class R>
  C10_HOST_DEVICE void run(const R& row, int64_t at) const {
    write_pack(row, kGrad, at, join_masters<V, false>(row, read_masters<V>(row, at)));
  }
};

// Does `work` on the packs of one thread of block `block` in a launch; `found` is the block's row.
template <class Work>
C10_HOST_DEVICE inline void run_step_chunk(const Work& work, const StepBlocks& found, int chunk, uint32_t block,
                                           int thread) {
  const StepBlocks row = found;  // a copy in registers: the compiler would reload it after each store
  const int64_t begin = static_cast<int64_t>(block - row.first) * chunk, left = row.size - begin;
  const int length = left < chunk ? static_cast<int>(left) : chunk;
  const auto run_packs = [&](const auto& packs_of) {
    for (int pack = thread; pack < length / 4; pack += kThreads) work.template run<4>(packs_of, begin / 4 + pack);
  };
  row.width == 4 ? run_packs(row) : run_packs(Loose<StepBlocks>{row});
  for (int i = length / 4 * 4 + thread; i < length; i += kThreads) work.template run<1>(row, begin + i);
}

}  // namespace amp_patch

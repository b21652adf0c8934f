// One chunk of one place of an optimizer's lists: what each thread of a block does with it. As chunk.h: nothing here
// calls CUDA, so that the tests (emulate.cpp) run the same code on the host.
#pragma once

#include "chunk.h"
#include "step_rows.h"

namespace amp_patch {

// A StepRow as a launch knows it.
struct StepBlocks : StepRow {
  uint32_t first;  // of the launch's blocks, the one that begins this row
  int32_t index;   // its place in the lists
  uint8_t width;   // elements of one memory access: 4, or 1 where the tensors are not aligned for that
  bool begins;     // with the tensor: one row of each tensor counts its step

  void begin_at(int64_t from) {
    for (int k = 0; k < kPlaces; ++k) {
      if (data[k] != nullptr) {
        data[k] = static_cast<char*>(data[k]) + from * static_cast<int64_t>(c10::elementSize(dtype[k]));
      }
    }
    size -= from;
    begins = from == 0;
  }
};

inline StepBlocks step_blocks(const StepRow& row, int64_t index) {
  StepBlocks blocks{row, 0, static_cast<int32_t>(index), 4, true};
  for (int k = 0; k < kPlaces; ++k) {
    const bool aligned =
        row.data[k] == nullptr || reinterpret_cast<uintptr_t>(row.data[k]) % (4 * c10::elementSize(row.dtype[k])) == 0;
    if (!aligned) blocks.width = 1;
  }
  return blocks;
}

template <class E, int V>
C10_HOST_DEVICE inline Pack<E, V> read_pack(const StepRow& row, int place, int64_t at) {
  return static_cast<const Pack<E, V>*>(row.data[place])[at];
}
template <class E, int V>
C10_HOST_DEVICE inline void write_pack(const StepRow& row, int place, int64_t at, const Pack<E, V>& pack) {
  static_cast<Pack<E, V>*>(row.data[place])[at] = pack;
}

// The masters of pack `at`: joined, or with what a user wrote into their weights.
template <int V>
C10_HOST_DEVICE inline Pack<float, V> read_masters(const StepRow& row, int64_t at) {
  if (row.dtype[kParam] == c10::ScalarType::Short) {
    const auto halves = read_pack<int16_t, V>(row, kParam, at);
    const auto weights = read_pack<c10::BFloat16, V>(row, kWeight, at);
    Pack<float, V> p;
    AMP_PATCH_UNROLL
    for (int v = 0; v < V; ++v) p.element[v] = join(weights.element[v], halves.element[v]);
    return p;
  }
  auto p = read_pack<float, V>(row, kParam, at);
  if (row.data[kWeight] == nullptr) return p;
  with_element<float, V>(row.dtype[kWeight], [&](auto element) {
    using E = decltype(element);
    const auto weights = read_pack<E, V>(row, kWeight, at);
    AMP_PATCH_UNROLL
    for (int v = 0; v < V; ++v) {
      float& master = p.element[v];
      const auto weight = static_cast<float>(weights.element[v]);
      if (!(static_cast<float>(static_cast<E>(master)) == weight)) master = weight;
    }
  });
  return p;
}

template <int V>
C10_HOST_DEVICE inline void write_masters(const StepRow& row, int64_t at, const Pack<float, V>& p) {
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

// What a thread does to packs of V elements. The three kinds of work have operator()<V>(row, at).
template <class F>
struct StepWork {
  F f;
  typename F::Rates rates;

  template <int V>
  C10_HOST_DEVICE void run(const StepRow& row, int64_t at) const {
    constexpr int S = F::kStates;
    Pack<float, V> g{}, states[S + 1];
    with_element<float, V>(row.dtype[kGrad], [&](auto element) {
      const auto grads = read_pack<decltype(element), V>(row, kGrad, at);
      AMP_PATCH_UNROLL
      for (int v = 0; v < V; ++v) g.element[v] = static_cast<float>(grads.element[v]);
    });
    AMP_PATCH_UNROLL
    for (int s = 0; s < S; ++s) states[s] = read_pack<float, V>(row, kState + s, at);
    Pack<float, V> p = read_masters<V>(row, at);
    AMP_PATCH_UNROLL
    for (int v = 0; v < V; ++v) {
      float own[S + 1];
      AMP_PATCH_UNROLL
      for (int s = 0; s < S; ++s) own[s] = states[s].element[v];
      f.template step<false>(rates, g.element[v], p.element[v], own);
      AMP_PATCH_UNROLL
      for (int s = 0; s < S; ++s) states[s].element[v] = own[s];
    }
    write_masters<V>(row, at, p);
    AMP_PATCH_UNROLL
    for (int s = 0; s < S; ++s) write_pack(row, kState + s, at, states[s]);
  }
};

// Whole masters, at kGrad, into split ones; and back.
struct SplitWork {
  template <int V>
  C10_HOST_DEVICE void run(const StepRow& row, int64_t at) const {
    write_masters<V>(row, at, read_pack<float, V>(row, kGrad, at));
  }
};
struct JoinWork {
  template <int V>
  C10_HOST_DEVICE void run(const StepRow& row, int64_t at) const {
    write_pack(row, kGrad, at, read_masters<V>(row, at));
  }
};

// What thread `thread` of block `block` does in a launch; `found` is the block's row.
template <class Work>
C10_HOST_DEVICE inline void run_step_chunk(const Work& work, const StepBlocks& found, int chunk, uint32_t block,
                                           int thread) {
  const StepBlocks row = found;  // in registers: stores might, for all the compiler knows, change it
  const int64_t begin = static_cast<int64_t>(block - row.first) * chunk, left = row.size - begin;
  const int length = left < chunk ? static_cast<int>(left) : chunk;
  int done = 0;
  if (row.width == 4) {
    done = length / 4 * 4;
    for (int pack = thread; pack < done / 4; pack += kThreads) work.template run<4>(row, begin / 4 + pack);
  }
  for (int i = done + thread; i < length; i += kThreads) work.template run<1>(row, begin + i);
}

}  // namespace amp_patch

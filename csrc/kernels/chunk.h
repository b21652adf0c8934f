// One chunk of one row of tensors: the work of each thread of a block. Nothing here calls CUDA, so that the tests
// (emulate.cpp) run the same code on the host, block by block and thread by thread.
//
// A branch on a row's dtypes is taken once for several elements, and all threads of a block take the same one. So every
// mix of dtypes runs at full speed, and the code grows with the number of dtypes and not with the number of mixes.
#pragma once

#include <cstring>
#include <type_traits>

#include "functors.h"
#include "rows.h"

#ifdef __CUDA_ARCH__
#define AMP_PATCH_UNROLL _Pragma("unroll")
#else
#define AMP_PATCH_UNROLL
#endif

namespace amp_patch {

struct Outcome {
  bool bad = false;
  double sum = 0;  // the sum of the functor's terms
};

// Tells the compiler that `p` points into global memory. For a pointer in a row it cannot deduce this, and would emit
// generic loads, which look up the kind of memory at each access.
template <class E>
C10_HOST_DEVICE inline E* global(E* p) {
#ifdef __CUDA_ARCH__
  __builtin_assume(__isGlobal(p));
#endif
  return p;
}

template <class E, int V>
struct alignas(sizeof(E) * V) Pack {
  E element[V];
};

// Calls visit(E()) with the element type of `dtype`. Packs of eight hold only 16-bit types (width_of).
template <class T, int V, class Visit>
C10_HOST_DEVICE inline void with_element(c10::ScalarType dtype, const Visit& visit) {
  if constexpr (std::is_same_v<T, double>) {
    visit(double());
  } else if (dtype == c10::ScalarType::Half) {
    visit(c10::Half());
  } else if (V == 8 || dtype == c10::ScalarType::BFloat16) {
    visit(c10::BFloat16());
  } else if constexpr (V != 8) {
    visit(float());
  }
}

// Calls visit(U()) with an unsigned integer of the element size of `dtype`. Code that only moves bits needs half as
// many branches by size as by dtype.
template <class T, int V, class Visit>
C10_HOST_DEVICE inline void with_size(c10::ScalarType dtype, const Visit& visit) {
  if constexpr (std::is_same_v<T, double>) {
    visit(uint64_t());
  } else if (V == 8 || dtype != c10::ScalarType::Float) {
    visit(uint16_t());
  } else if constexpr (V != 8) {
    visit(uint32_t());
  }
}

// The elements of a pack as bits, of a dtype known at run time, in as many words as the largest dtype needs.
template <class T, int V>
struct Bits {
  static constexpr int kWords = V == 8 ? 4 : V * sizeof(T) / 4;
#ifdef __CUDA_ARCH__
  uint32_t word[kWords];
#else  // initialized, because the host's compiler cannot see that only words that were read are used, and warns
  uint32_t word[kWords] = {};
#endif

  template <class E>
  C10_HOST_DEVICE void read(const void* data, int64_t at) {
    if constexpr (sizeof(E) * V < 4) {
      word[0] = *global(static_cast<const uint16_t*>(data) + at);
    } else {
      const auto words = *global(static_cast<const Pack<uint32_t, sizeof(E) * V / 4>*>(data) + at);
      AMP_PATCH_UNROLL
      for (int i = 0; i < static_cast<int>(sizeof(E) * V / 4); ++i) word[i] = words.element[i];
    }
  }
  template <class E>
  C10_HOST_DEVICE void write(void* data, int64_t at) const {
    *global(static_cast<Pack<E, V>*>(data) + at) = as<E>();
  }
  template <class E>
  C10_HOST_DEVICE Pack<E, V> as() const {
    Pack<E, V> pack;
    std::memcpy(&pack, word, sizeof(pack));
    return pack;
  }
};

// The packs that a thread works on at once. from(k, p) is the index of pack p in tensor k, counted in packs; live(p)
// tells whether pack p is inside the row; to(k, p) is the index to which a live pack is written. A pack that is not
// live is read from the index of a live one, and never used. (A load under a predicate would need its registers cleared
// first, and the compiler would then wait for one load before it issues the next.)
struct FullPacks {
  int start;

  C10_HOST_DEVICE static constexpr bool live(int) { return true; }
  C10_HOST_DEVICE int from(int, int p) const { return start + p * kThreads; }
  C10_HOST_DEVICE int to(int, int p) const { return start + p * kThreads; }
};
struct LastPacks {
  int start, end;  // start < end

  C10_HOST_DEVICE bool live(int p) const { return start + p * kThreads < end; }
  C10_HOST_DEVICE int from(int, int p) const { return live(p) ? start + p * kThreads : start; }
  C10_HOST_DEVICE int to(int, int p) const { return start + p * kThreads; }
};

// Loads P packs of tensor k, in two branches at most, so that the loads of both inputs are issued before the first use.
template <class T, int V, int P, class Places>
C10_HOST_DEVICE inline void load(const void* data, c10::ScalarType dtype, int k, const Places& places,
                                 Bits<T, V> (&bits)[P]) {
  with_size<T, V>(dtype, [&](auto element) {
    using E = decltype(element);
    AMP_PATCH_UNROLL
    for (int p = 0; p < P; ++p) bits[p].template read<E>(data, places.from(k, p));
  });
}

// Converts the loaded packs [first, first + G) to T.
template <int G, class T, int V>
C10_HOST_DEVICE inline void convert(const Bits<T, V>* bits, int first, c10::ScalarType dtype, Pack<T, V> (&x)[G]) {
  with_element<T, V>(dtype, [&](auto element) {
    AMP_PATCH_UNROLL
    for (int g = 0; g < G; ++g) {
      const auto pack = bits[first + g].template as<decltype(element)>();
      AMP_PATCH_UNROLL
      for (int v = 0; v < V; ++v) x[g].element[v] = static_cast<T>(pack.element[v]);
    }
  });
}

// Rounds packs [first, first + G) to the dtype of tensor k and stores the packs whose `writes` is true. kAgain: sets x
// to the stored values.
template <bool kAgain, int G, class T, int V, class Places>
C10_HOST_DEVICE inline void store(void* data, c10::ScalarType dtype, int k, const Places& places, int first,
                                  const bool (&writes)[G], Pack<T, V> (&x)[G]) {
  with_element<T, V>(dtype, [&](auto element) {
    using E = decltype(element);
    AMP_PATCH_UNROLL
    for (int g = 0; g < G; ++g) {
      Pack<E, V> pack;
      AMP_PATCH_UNROLL
      for (int v = 0; v < V; ++v) {
        pack.element[v] = static_cast<E>(x[g].element[v]);
        if constexpr (kAgain) x[g].element[v] = static_cast<T>(pack.element[v]);
      }
      if (writes[g]) *global(static_cast<Pack<E, V>*>(data) + places.to(k, first + g)) = pack;
    }
  });
}

// Copies P packs of a row from tensor 0 to tensor 1 of the same dtype, without a conversion, which would change NaNs.
template <class T, int V, int P, class Places>
C10_HOST_DEVICE inline void copy_bits(void* data, c10::ScalarType dtype, const Places& places,
                                      const Bits<T, V> (&bits)[P]) {
  with_size<T, V>(dtype, [&](auto element) {
    AMP_PATCH_UNROLL
    for (int p = 0; p < P; ++p) {
      if (places.live(p)) bits[p].template write<decltype(element)>(data, places.to(1, p));
    }
  });
}

// Applies the functor to P packs of a row; data[k]: the memory of tensor k.
template <class T, int N, int V, int P, int K, class F, class Places>
C10_HOST_DEVICE inline void packs_through(const F& f, void* const (&data)[K], const c10::ScalarType (&dtype)[K],
                                          const Places& places, Outcome& outcome) {
  // Packs converted at a time: one for 16-bit types, since converted they take twice the registers.
  constexpr int G = V == 8 ? 1 : P;
  constexpr bool kSeldom = std::is_same_v<F, Adopt<T>>;  // stores only packs that change
  Bits<T, V> bits[N][P];
  AMP_PATCH_UNROLL
  for (int n = 0; n < N; ++n) load<T, V, P>(data[n], dtype[n], n, places, bits[n]);
  if constexpr (std::is_same_v<F, Copy<T>>) {
    if (dtype[0] == dtype[1]) return copy_bits<T, V, P>(data[1], dtype[1], places, bits[0]);
  }
  [[maybe_unused]] T sum = 0;  // the sum of few terms, for which T is precise enough; Outcome::sum is double
  AMP_PATCH_UNROLL
  for (int first = 0; first < P; first += G) {
    Pack<T, V> x[N][G];
    AMP_PATCH_UNROLL
    for (int n = 0; n < N; ++n) convert<G>(bits[n], first, dtype[n], x[n]);
    bool writes[G];
    AMP_PATCH_UNROLL
    for (int g = 0; g < G; ++g) {
      bool bad = false, changes = !kSeldom;
      AMP_PATCH_UNROLL
      for (int v = 0; v < V; ++v) {
        const T one = x[0][g].element[v];
        T& result = x[0][g].element[v];
        if constexpr (N == 1) {
          result = f(one);
          if constexpr (F::watches) bad = bad | f.bad(result, one);
        } else {
          const T other = x[1][g].element[v];
          if constexpr (kSeldom) changes = changes | f.changes(one, other);
          result = f(one, other);
          if constexpr (F::watches) bad = bad | f.bad(result, one, other);
        }
      }
      const bool live = places.live(first + g);
      writes[g] = live & changes;
      if constexpr (F::watches) outcome.bad = outcome.bad | (live & bad);
    }
    if constexpr (F::writes) store<F::reduces>(data[K - 1], dtype[K - 1], K - 1, places, first, writes, x[0]);
    if constexpr (F::reduces) {  // sums the stored, rounded values if the functor writes
      AMP_PATCH_UNROLL
      for (int g = 0; g < G; ++g) {
        AMP_PATCH_UNROLL
        for (int v = 0; v < V; ++v) sum += places.live(first + g) ? f.term(x[0][g].element[v]) : T(0);
      }
    }
  }
  if constexpr (F::reduces) outcome.sum += static_cast<double>(sum);
}

// The packs of each input that a thread has in flight: four loads of 16 bytes together, or eight of float64. With the
// 1,024 threads of a multiprocessor this is 64 KiB, about three times the amount that hides the latency of an H100's
// memory. More do not fit the 64 registers of a thread.
template <int N, int V>
constexpr int kFlight = (V == 2 ? 8 : 4) / N;

// Applies the functor to elements [begin, begin + count) of a linear row, V at a time; both are multiples of V.
template <class T, int N, int V, int K, class F>
C10_HOST_DEVICE inline void linear_part(const F& f, const Row<K>& row, int64_t begin, int count, int thread,
                                        Outcome& outcome) {
  constexpr int P = kFlight<N, V>;
  const int packs = count / V;
  void* data[K];
  AMP_PATCH_UNROLL
  for (int k = 0; k < K; ++k) {
    with_size<T, V>(row.dtype[k], [&](auto element) {
      data[k] = static_cast<char*>(row.data[k]) + begin * static_cast<int64_t>(sizeof(element));
    });
  }
  int start = thread;
  for (; start + (P - 1) * kThreads < packs; start += P * kThreads) {
    packs_through<T, N, V, P, K>(f, data, row.dtype, FullPacks{start}, outcome);
  }
  if (start < packs) packs_through<T, N, V, P, K>(f, data, row.dtype, LastPacks{start, packs}, outcome);
}

// As FullPacks, for elements at any places.
template <int K, int P>
struct StridedPacks {
  int64_t place[K][P];
  int start, end;

  C10_HOST_DEVICE bool live(int p) const { return start + p * kThreads < end; }
  C10_HOST_DEVICE int64_t from(int k, int p) const { return place[k][p]; }
  C10_HOST_DEVICE int64_t to(int k, int p) const { return place[k][p]; }
};

// Finds the place of element i in each tensor.
template <class Index, int K, int P>
C10_HOST_DEVICE inline void locate(const StridedRow<K>& row, int64_t i, int p, StridedPacks<K, P>& places) {
  auto rest = static_cast<Index>(i);
  AMP_PATCH_UNROLL
  for (int k = 0; k < K; ++k) places.place[k][p] = 0;
  for (int d = row.dims - 1; d >= 0; --d) {
    const auto size = static_cast<Index>(row.sizes[d]);
    const Index outer = d > 0 ? rest / size : Index(0);
    const auto coordinate = static_cast<int64_t>(rest - outer * size);
    AMP_PATCH_UNROLL
    for (int k = 0; k < K; ++k) places.place[k][p] += coordinate * row.strides[k][d];
    rest = outer;
  }
}

// Applies the functor to elements [begin, begin + count) of a strided row, one at a time.
template <class T, int N, int K, class F>
C10_HOST_DEVICE inline void strided_part(const F& f, const StridedRow<K>& row, int64_t begin, int count, int thread,
                                         Outcome& outcome) {
  constexpr int P = sizeof(T) * N == 16 ? 1 : 2;  // places of more packs do not fit the registers
  void* data[K];
  c10::ScalarType dtype[K];
  AMP_PATCH_UNROLL
  for (int k = 0; k < K; ++k) {
    data[k] = row.data[k];
    dtype[k] = row.dtype[k];
  }
  for (int start = thread; start < count; start += P * kThreads) {
    StridedPacks<K, P> places;
    places.start = start;
    places.end = count;
    AMP_PATCH_UNROLL
    for (int p = 0; p < P; ++p) {
      const int64_t element = begin + (places.live(p) ? start + p * kThreads : start);
      if (row.narrow) {
        locate<uint32_t>(row, element, p, places);
      } else {
        locate<uint64_t>(row, element, p, places);
      }
    }
    packs_through<T, N, 1, P, K>(f, data, dtype, places, outcome);
  }
}

// Finds the row that a block belongs to.
template <class R>
C10_HOST_DEVICE inline int row_of(const R* rows, int count, uint32_t block) {
  int low = 0;
  for (int high = count; high - low > 1;) {
    const int middle = low + (high - low) / 2;
    (rows[middle].first <= block ? low : high) = middle;
  }
  return low;
}

// Does the work of thread `thread` of block `block` in a launch over `rows`.
template <class T, int N, class F, class R>
C10_HOST_DEVICE inline Outcome run_chunk(F f, const R* rows, int count, int chunk, uint32_t block, int thread) {
  constexpr int K = N + (F::writes ? 1 : 0);
  const R& found = rows[row_of(rows, count, block)];
  const int64_t offset = static_cast<int64_t>(block - found.first) * chunk;
  Outcome outcome;
  f.prepare(found.dtype[0], found.dtype[K - 1]);
  if constexpr (R::strided) {
    const int64_t begin = found.begin + offset, left = found.size - begin;
    strided_part<T, N, K>(f, found, begin, left < chunk ? static_cast<int>(left) : chunk, thread, outcome);
  } else {
    const Row<K> row = found;  // a copy in registers: the compiler would reload `rows` after each store below
    const int64_t left = row.size - offset;
    const int length = left < chunk ? static_cast<int>(left) : chunk;
    int done = 0;
    if constexpr (std::is_same_v<T, double>) {
      if (row.width == 2) linear_part<T, N, 2, K>(f, row, offset, done = length / 2 * 2, thread, outcome);
    } else if (row.width == 8) {
      linear_part<T, N, 8, K>(f, row, offset, done = length / 8 * 8, thread, outcome);
    } else if (row.width == 4) {
      linear_part<T, N, 4, K>(f, row, offset, done = length / 4 * 4, thread, outcome);
    }
    // The last few elements of an aligned row, or all elements of any other. `found` is read again, because keeping
    // `row` until here costs registers.
    if (done < length) {
      const Row<K> again = found;
      linear_part<T, N, 1, K>(f, again, offset + done, length - done, thread, outcome);
    }
  }
  return outcome;
}

}  // namespace amp_patch

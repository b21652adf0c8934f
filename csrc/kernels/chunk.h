// One chunk of one row of tensors: what each thread of a block does with it. Nothing here calls CUDA, so that the tests
// (emulate.cpp) run the same code on the host, block by block and thread by thread.
//
// Which dtypes a row has is asked once for several elements, in branches that a whole block takes alike: so every mix
// of dtypes runs at full speed, and the code grows with the number of dtypes, not with that of their mixes.
#pragma once

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
  double sum = 0;  // of the functor's terms
};

template <class E, int V>
struct alignas(sizeof(E) * V) Pack {
  E element[V];
};

// visit(E()) for the element type that dtype names. Packs of eight hold 16-bit types alone (width_of).
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

// P packs, at places counted in packs; those that are not live stay zero. All loads are issued before the first use.
template <class E, int V, int P, class Place>
C10_HOST_DEVICE inline void load(const void* data, const Place (&at)[P], const bool (&live)[P],
                                 Pack<E, V> (&packs)[P]) {
  AMP_PATCH_UNROLL
  for (int p = 0; p < P; ++p) {
    packs[p] = Pack<E, V>{};
    if (live[p]) packs[p] = static_cast<const Pack<E, V>*>(data)[at[p]];
  }
}

template <class E, int V, int P, class Place>
C10_HOST_DEVICE inline void store(void* data, const Place (&at)[P], const bool (&live)[P],
                                  const Pack<E, V> (&packs)[P]) {
  AMP_PATCH_UNROLL
  for (int p = 0; p < P; ++p) {
    if (live[p]) static_cast<Pack<E, V>*>(data)[at[p]] = packs[p];
  }
}

template <class To, class From, int V, int P>
C10_HOST_DEVICE inline void convert(const Pack<From, V> (&from)[P], Pack<To, V> (&to)[P]) {
  AMP_PATCH_UNROLL
  for (int p = 0; p < P; ++p) {
    AMP_PATCH_UNROLL
    for (int v = 0; v < V; ++v) to[p].element[v] = static_cast<To>(from[p].element[v]);
  }
}

// P packs of a row copied, from tensor 0 to tensor 1: to another dtype by way of T, to the same one bit by bit.
template <class T, int V, int P, class Place>
C10_HOST_DEVICE inline void copy_packs(void* const (&data)[2], const c10::ScalarType (&dtype)[2],
                                       const Place (&at)[2][P], const bool (&live)[P]) {
  with_element<T, V>(dtype[0], [&](auto from) {
    using From = decltype(from);
    Pack<From, V> source[P];
    load<From, V, P>(data[0], at[0], live, source);
    with_element<T, V>(dtype[1], [&](auto to) {
      using To = decltype(to);
      if constexpr (std::is_same_v<From, To>) {  // every bit, a NaN's too
        store<To, V, P>(data[1], at[1], live, source);
      } else {
        Pack<T, V> x[P];
        Pack<To, V> target[P];
        convert(source, x);
        convert(x, target);
        store<To, V, P>(data[1], at[1], live, target);
      }
    });
  });
}

// P packs of a row through the functor. at[k]: where they lie in tensor k, whose memory is data[k].
template <class T, int N, int V, int P, int K, class F, class Place>
C10_HOST_DEVICE inline void packs_through(const F& f, void* const (&data)[K], const c10::ScalarType (&dtype)[K],
                                          const Place (&at)[K][P], const bool (&live)[P], Outcome& outcome) {
  if constexpr (std::is_same_v<F, Copy<T>>) {
    copy_packs<T, V, P>(data, dtype, at, live);
  } else {
    Pack<T, V> x[N][P], value[P];
    AMP_PATCH_UNROLL
    for (int n = 0; n < N; ++n) {
      with_element<T, V>(dtype[n], [&](auto element) {
        using E = decltype(element);
        Pack<E, V> source[P];
        load<E, V, P>(data[n], at[n], live, source);
        convert(source, x[n]);
      });
    }
    AMP_PATCH_UNROLL
    for (int p = 0; p < P; ++p) {
      AMP_PATCH_UNROLL
      for (int v = 0; v < V; ++v) {
        T& result = value[p].element[v];
        const T first = x[0][p].element[v];
        // What is not live was never loaded: 0 times an infinite factor must not raise a flag.
        if constexpr (N == 1) {
          result = f(first);
          if constexpr (F::watches) outcome.bad = outcome.bad | (live[p] & f.bad(result, first));
        } else {
          const T second = x[1][p].element[v];
          result = f(first, second);
          if constexpr (F::watches) outcome.bad = outcome.bad | (live[p] & f.bad(result, first, second));
        }
      }
    }
    if constexpr (F::writes) {
      with_element<T, V>(dtype[K - 1], [&](auto element) {
        using E = decltype(element);
        Pack<E, V> target[P];
        convert(value, target);
        store<E, V, P>(data[K - 1], at[K - 1], live, target);
        if constexpr (F::reduces) convert(target, value);  // the sum is of what was stored
      });
    }
    if constexpr (F::reduces) {
      T sum = 0;  // of few, so that T suffices
      AMP_PATCH_UNROLL
      for (int p = 0; p < P; ++p) {
        AMP_PATCH_UNROLL
        for (int v = 0; v < V; ++v) sum += live[p] ? f.term(value[p].element[v]) : T(0);
      }
      outcome.sum += static_cast<double>(sum);
    }
  }
}

// How many packs a thread has in flight: two to four accesses of 16 bytes per input, fewer where there are two inputs.
template <int N, int V>
constexpr int kFlight = V == 1 ? 4 : (N == 1 ? 16 : 8) / V;

// Elements [begin, begin + count) of a linear row, V at a time; begin and count are multiples of V.
template <class T, int N, int V, int K, class F>
C10_HOST_DEVICE inline void linear_part(const F& f, const Row<K>& row, int64_t begin, int count, int thread,
                                        Outcome& outcome) {
  constexpr int P = kFlight<N, V>;
  const int packs = count / V;
  void* data[K];
  AMP_PATCH_UNROLL
  for (int k = 0; k < K; ++k) {
    with_element<T, V>(row.dtype[k], [&](auto element) {
      data[k] = static_cast<char*>(row.data[k]) + begin * static_cast<int64_t>(sizeof(element));
    });
  }
  for (int start = thread; start < packs; start += P * kThreads) {
    int at[K][P];
    bool live[P];
    AMP_PATCH_UNROLL
    for (int p = 0; p < P; ++p) {
      live[p] = start + p * kThreads < packs;
      AMP_PATCH_UNROLL
      for (int k = 0; k < K; ++k) at[k][p] = start + p * kThreads;
    }
    packs_through<T, N, V, P, K>(f, data, row.dtype, at, live, outcome);
  }
}

// Where element i lies in each tensor.
template <class Index, int K, int P>
C10_HOST_DEVICE inline void locate(const StridedRow<K>& row, int64_t i, int64_t (&at)[K][P], int p) {
  auto rest = static_cast<Index>(i);
  AMP_PATCH_UNROLL
  for (int k = 0; k < K; ++k) at[k][p] = 0;
  for (int d = row.dims - 1; d >= 0; --d) {
    const auto size = static_cast<Index>(row.sizes[d]);
    const Index outer = d > 0 ? rest / size : Index(0);
    const auto coordinate = static_cast<int64_t>(rest - outer * size);
    AMP_PATCH_UNROLL
    for (int k = 0; k < K; ++k) at[k][p] += coordinate * row.strides[k][d];
    rest = outer;
  }
}

// Elements [begin, begin + count) of a strided row, one at a time.
template <class T, int N, int K, class F>
C10_HOST_DEVICE inline void strided_part(const F& f, const StridedRow<K>& row, int64_t begin, int count, int thread,
                                         Outcome& outcome) {
  constexpr int P = kFlight<N, 1>;
  void* data[K];
  c10::ScalarType dtype[K];
  AMP_PATCH_UNROLL
  for (int k = 0; k < K; ++k) {
    data[k] = row.data[k];
    dtype[k] = row.dtype[k];
  }
  for (int start = thread; start < count; start += P * kThreads) {
    int64_t at[K][P];
    bool live[P];
    AMP_PATCH_UNROLL
    for (int p = 0; p < P; ++p) {
      const int i = start + p * kThreads;
      live[p] = i < count;
      const int64_t element = begin + i;  // past the end it is located, but not read
      if (row.narrow) {
        locate<uint32_t>(row, element, at, p);
      } else {
        locate<uint64_t>(row, element, at, p);
      }
    }
    packs_through<T, N, 1, P, K>(f, data, dtype, at, live, outcome);
  }
}

// The row that a block belongs to.
template <class R>
C10_HOST_DEVICE inline int row_of(const R* rows, int count, uint32_t block) {
  int low = 0;
  for (int high = count; high - low > 1;) {
    const int middle = low + (high - low) / 2;
    (rows[middle].first <= block ? low : high) = middle;
  }
  return low;
}

// What thread `thread` of block `block` does in a launch over `rows`.
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
    const Row<K> row = found;  // in registers: the stores below might, for all the compiler knows, change `rows`
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
    // The last few elements of an aligned row, all of another.
    if (done < length) linear_part<T, N, 1, K>(f, row, offset + done, length - done, thread, outcome);
  }
  return outcome;
}

}  // namespace amp_patch

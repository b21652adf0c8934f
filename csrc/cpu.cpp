// The loop on the CPU. A chunk of a tensor goes block by block through small buffers of T: load (convert, gather),
// apply the functor, store (round, scatter). So the code grows with the number of dtypes, not with that of their mixes.
// FP32 tensors that are dense skip the buffers.
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "ops.h"
#include "plan.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define AMP_PATCH_AVX2 1
#include <immintrin.h>
#endif

namespace amp_patch {
namespace {

constexpr int64_t kBlock = 512;         // elements of a buffer: three of them stay in the L1 cache
constexpr int64_t kChunk = 16384;       // elements of a chunk: the grain of norms, so of their rounding
constexpr int64_t kGrain = 32768;       // least work worth a thread, torch's own grain
constexpr int64_t kChunkOverhead = 64;  // what a chunk costs by itself, in elements

// ---------------------------------------------------------------------------------------------------------------------
// One build, two instruction sets, chosen at run time

#ifdef AMP_PATCH_AVX2
const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");

template <class Body>
__attribute__((target("avx2,f16c"), flatten, noinline)) void with_avx2(const Body& body) {
  body();
}
#endif

// Runs body(), a loop, compiled for this machine. Both ways give the same bits: nothing is contracted or reordered.
template <class Body>
void vectorized(const Body& body) {
#ifdef AMP_PATCH_AVX2
  if (has_avx2) return with_avx2(body);
#endif
  body();
}

// Elements do not depend on one another, not even where the output is an input.
#if defined(__clang__)
#define AMP_PATCH_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define AMP_PATCH_INDEPENDENT _Pragma("GCC ivdep")
#else
#define AMP_PATCH_INDEPENDENT
#endif

template <class From, class To>
void convert(const From* from, To* to, int64_t n) {
  vectorized([=] {
    AMP_PATCH_INDEPENDENT
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<To>(from[i]);
  });
}

#ifdef AMP_PATCH_AVX2
// Compilers do not find these instructions by themselves; in software a half takes ten times as long.
__attribute__((target("avx2,f16c"))) int64_t convert_f16c(const c10::Half* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
  return i;
}

__attribute__((target("avx2,f16c"))) int64_t convert_f16c(const float* from, c10::Half* to, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), halves);
  }
  return i;
}
#endif

template <class From, class To>
void convert_half(const From* from, To* to, int64_t n) {
  int64_t i = 0;
#ifdef AMP_PATCH_AVX2
  if (has_avx2) i = convert_f16c(from, to, n);
#endif
  for (; i < n; ++i) to[i] = static_cast<To>(from[i]);
}

inline void convert(const c10::Half* from, float* to, int64_t n) { convert_half(from, to, n); }
inline void convert(const float* from, c10::Half* to, int64_t n) { convert_half(from, to, n); }

// ---------------------------------------------------------------------------------------------------------------------
// A tensor as a row of elements

struct View {
  void* data;
  at::ScalarType dtype;
  bool linear;  // element i lies at data[i]
  at::IntArrayRef sizes, strides;
};

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) != 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

// Tensors that fill their memory in one common order (all contiguous, all channels_last, all transposed alike) are
// walked in that order. Else all are walked in the order of their indices, by strides where memory has another one.
template <size_t N>
std::array<View, N> view(const std::array<const at::Tensor*, N>& tensors) {
  bool common = true;
  for (const at::Tensor* t : tensors) {
    common = common && t->is_non_overlapping_and_dense() && same_layout(*t, *tensors[0]);
  }
  std::array<View, N> views;
  for (size_t k = 0; k < N; ++k) {
    const at::Tensor& t = *tensors[k];
    // const_data_ptr, for what is written too: run() has asked for mutable data once, before the threads start.
    views[k] = {const_cast<void*>(t.const_data_ptr()), t.scalar_type(), common || t.is_contiguous(), t.sizes(),
                t.strides()};
  }
  return views;
}

// Calls visit(offset, position, length, stride) for the runs that make up elements [begin, begin + n).
template <class Visit>
void walk(const View& v, int64_t begin, int64_t n, const Visit& visit) {
  if (v.linear) return visit(begin, int64_t(0), n, int64_t(1));
  const int64_t last = static_cast<int64_t>(v.sizes.size()) - 1;
  std::vector<int64_t> index(v.sizes.size());
  int64_t offset = 0;
  for (int64_t d = last, rest = begin; d >= 0; --d) {
    index[d] = rest % v.sizes[d];
    rest /= v.sizes[d];
    offset += index[d] * v.strides[d];
  }
  for (int64_t position = 0;;) {
    const int64_t length = std::min(v.sizes[last] - index[last], n - position);
    visit(offset, position, length, v.strides[last]);
    position += length;
    if (position == n) return;
    offset += length * v.strides[last];
    index[last] += length;
    for (int64_t d = last; index[d] == v.sizes[d]; --d) {
      offset += v.strides[d - 1] - v.sizes[d] * v.strides[d];
      index[d] = 0;
      ++index[d - 1];
    }
  }
}

template <class Element, class T>
void load_as(const View& v, int64_t begin, int64_t n, T* buffer) {
  const Element* data = static_cast<const Element*>(v.data);
  walk(v, begin, n, [=](int64_t offset, int64_t position, int64_t length, int64_t stride) {
    if (stride == 1) return convert(data + offset, buffer + position, length);
    for (int64_t i = 0; i < length; ++i) buffer[position + i] = static_cast<T>(data[offset + i * stride]);
  });
}

template <class Element, class T>
void store_as(const View& v, int64_t begin, int64_t n, const T* buffer) {
  Element* data = static_cast<Element*>(v.data);
  walk(v, begin, n, [=](int64_t offset, int64_t position, int64_t length, int64_t stride) {
    if (stride == 1) return convert(buffer + position, data + offset, length);
    for (int64_t i = 0; i < length; ++i) data[offset + i * stride] = static_cast<Element>(buffer[position + i]);
  });
}

// The tensor's own memory where it is a row of T, else null.
template <class T>
T* direct(const View& v, int64_t begin) {
  return v.linear && v.dtype == c10::CppTypeToScalarType<T>::value ? static_cast<T*>(v.data) + begin : nullptr;
}

template <class T>
const T* load(const View& v, int64_t begin, int64_t n, T* buffer) {
  if (const T* data = direct<T>(v, begin)) return data;
  if constexpr (std::is_same_v<T, double>) {
    load_as<double>(v, begin, n, buffer);
  } else if (v.dtype == at::kHalf) {
    load_as<c10::Half>(v, begin, n, buffer);
  } else if (v.dtype == at::kBFloat16) {
    load_as<c10::BFloat16>(v, begin, n, buffer);
  } else {
    load_as<float>(v, begin, n, buffer);
  }
  return buffer;
}

template <class T>
void store(const View& v, int64_t begin, int64_t n, const T* buffer) {
  if constexpr (std::is_same_v<T, double>) {
    store_as<double>(v, begin, n, buffer);
  } else if (v.dtype == at::kHalf) {
    store_as<c10::Half>(v, begin, n, buffer);
  } else if (v.dtype == at::kBFloat16) {
    store_as<c10::BFloat16>(v, begin, n, buffer);
  } else {
    store_as<float>(v, begin, n, buffer);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// A functor over a block

// value = f(x...) into out, where the functor writes. Returns whether any element was bad.
template <class T, size_t N, class Functor>
bool apply(const Functor& functor, const std::array<const T*, N>& in, T* out, int64_t n) {
  int bad = 0;
  vectorized([&] {
    const Functor f = functor;  // by value: out might alias what a reference leads to
    const T *x = in[0], *y = in[N - 1];
    T* z = out;
    const int64_t count = n;
    int any = 0;
    AMP_PATCH_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) {
      T value;
      if constexpr (N == 1) {
        value = f(x[i]);
        any |= static_cast<int>(f.bad(value, x[i]));
      } else {
        value = f(x[i], y[i]);
        any |= static_cast<int>(f.bad(value, x[i], y[i]));
      }
      if constexpr (Functor::writes) z[i] = value;
    }
    bad = any;
  });
  return bad != 0;
}

// The sum of f.term, in 16 interleaved sums of T: a fixed order, whatever the instruction set.
template <class T, class Functor>
double reduce(const Functor& functor, const T* stored, int64_t n) {
  constexpr int64_t kLanes = 16;
  double sum = 0;
  vectorized([&] {
    const Functor f = functor;
    T lanes[kLanes] = {};
    const int64_t whole = n / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += f.term(stored[i + lane]);
    }
    for (int64_t i = whole; i < n; ++i) lanes[i - whole] += f.term(stored[i]);
    for (const T lane : lanes) sum += lane;
  });
  return sum;
}

struct Result {
  bool bad = false;
  double squares = 0;
};

// Elements [begin, end) of one tensor; views holds the inputs and, where the functor writes, the output.
template <class T, size_t N, class Functor, size_t Views>
Result run_chunk(Functor f, const std::array<View, Views>& views, int64_t begin, int64_t end) {
  const View& out = views[Views - 1];
  Result result;
  f.prepare(views[0].dtype, out.dtype);
  alignas(64) T buffers[N + 1][kBlock];
  for (int64_t lo = begin; lo < end; lo += kBlock) {
    const int64_t n = std::min(kBlock, end - lo);
    if constexpr (std::is_same_v<Functor, Copy<T>>) {  // no arithmetic: load and store are all there is to do
      T* target = direct<T>(out, lo);
      const T* x = load(views[0], lo, n, target != nullptr ? target : buffers[0]);
      if (target == nullptr) store(out, lo, n, x);
      if (target != nullptr && target != x) std::copy(x, x + n, target);
      continue;
    }
    std::array<const T*, N> in;
    for (size_t k = 0; k < N; ++k) in[k] = load(views[k], lo, n, buffers[k]);
    T* target = Functor::writes ? direct<T>(out, lo) : nullptr;
    const bool buffered = Functor::writes && target == nullptr;
    if (buffered) target = buffers[N];
    if constexpr (Functor::writes || Functor::watches) result.bad |= apply<T, N>(f, in, target, n);
    if (buffered) store(out, lo, n, target);
    if constexpr (Functor::reduces) {
      const T* stored = Functor::writes ? target : in[0];
      if (buffered) stored = load(out, lo, n, buffers[N]);  // what was stored is rounded
      result.squares += reduce(f, stored, n);
    }
  }
  return result;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------

struct CpuLoop {
  static constexpr c10::DeviceType device = c10::DeviceType::CPU;

  template <class T, int N, class Functor>
  static void run(const Job<N>& job, const Functor& f) {
    using Row = std::array<const at::Tensor*, N + (Functor::writes ? 1 : 0)>;  // inputs, then the output
    std::vector<int64_t> sizes;
    sizes.reserve(job.indices.size());
    for (const int64_t i : job.indices) {
      if (Functor::writes)
        (*job.out)[i].mutable_data_ptr();  // a lazy copy becomes real here, not in several threads at once
      sizes.push_back((*job.in[0])[i].numel());
    }
    constexpr int64_t unlimited = std::numeric_limits<int64_t>::max();
    const std::vector<Chunk> chunks = std::move(plan(sizes, kChunk, unlimited, unlimited)[0].chunks);

    // Threads share the work by elements, not by tensors: many tiny ones beside a huge one is the usual model.
    std::vector<int64_t> starts;
    starts.reserve(chunks.size());
    int64_t work = 0;
    for (const Chunk& chunk : chunks) {
      starts.push_back(work);
      work += kChunkOverhead + std::min(kChunk, sizes[chunk.slot] - chunk.index * kChunk);
    }
    std::vector<double> squares(Functor::reduces ? chunks.size() : 0);
    std::atomic<bool> bad{false};
    at::parallel_for(0, work, kGrain, [&](int64_t from, int64_t to) {
      for (auto c = std::lower_bound(starts.begin(), starts.end(), from) - starts.begin();
           c < static_cast<int64_t>(chunks.size()) && starts[c] < to; ++c) {
        const int64_t slot = chunks[c].slot, begin = chunks[c].index * kChunk;
        Row tensors;
        for (size_t k = 0; k < N; ++k) tensors[k] = &(*job.in[k])[job.indices[slot]];
        if constexpr (Functor::writes) tensors[N] = &(*job.out)[job.indices[slot]];
        const auto result = run_chunk<T, N>(f, view(tensors), begin, std::min(begin + kChunk, sizes[slot]));
        if (result.bad) bad.store(true, std::memory_order_relaxed);
        if constexpr (Functor::reduces) squares[c] = result.squares;
      }
    });
    if (bad && job.found_inf != nullptr) *job.found_inf = 1.0f;
    for (size_t c = 0; c < squares.size(); ++c) job.squares[job.indices[chunks[c].slot]] += squares[c];
  }

  static at::Tensor total(const at::Tensor& squares) {
    double sum = 0;
    const double* values = squares.const_data_ptr<double>();
    for (int64_t i = 0; i < squares.numel(); ++i) sum += values[i];
    return at::scalar_tensor(sum, squares.options());
  }

  template <class Functor>
  static void once(const Functor& f) {
    f();
  }
};

template struct Ops<CpuLoop>;

}  // namespace amp_patch

// The loop on the CPU: the ops of ops.h over it are the kernels for CPU tensors. A chunk of a tensor is one call of
// Set::map (cpu_vectors.h), which reads and writes the tensors' own memory: an element is loaded, converted, computed,
// rounded and stored without leaving the registers. A chunk that is not a row in memory, or has a rare mix of dtypes,
// is processed block by block through small buffers.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define AMP_PATCH_X86 1
#include <immintrin.h>
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // wrong, in GCC 12's own headers: gcc.gnu.org/PR105593
#endif

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>

#include "cpu_chunks.h"
#include "ops.h"

namespace amp_patch {
namespace {

constexpr int64_t kLanes = 64;           // partial sums of a chunk's norm: the same number on every instruction set
constexpr int64_t kBlock = 256;          // elements of a row: three of them stay in the L1 cache
constexpr int64_t kGrain = 32768;        // elements: the least work worth a thread, as torch's GRAIN_SIZE
constexpr int64_t kReadAhead = 8192;     // bytes between a load and the prefetch beside it, in loops that only read
constexpr int64_t kStreamed = 16 << 20;  // bytes of output, more than a cache holds: from here on stores bypass it

struct Result {
  bool bad = false;
  double squares = 0;
};

// ---------------------------------------------------------------------------------------------------------------------
// One build, three instruction sets, chosen at run time

namespace portable {
#define AMP_PATCH_WIDTH 1
#include "cpu_vectors.h"
#undef AMP_PATCH_WIDTH
}  // namespace portable

#ifdef AMP_PATCH_X86
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
namespace avx2 {
#define AMP_PATCH_WIDTH 8
#include "cpu_vectors.h"
#undef AMP_PATCH_WIDTH
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")
namespace avx512 {
#define AMP_PATCH_WIDTH 16
#include "cpu_vectors.h"
#undef AMP_PATCH_WIDTH
}  // namespace avx512
#pragma GCC pop_options
#endif

// Calls visit(Set()) with the chosen instruction set; float64 is only computed by the portable one.
template <class T, class Visit>
Result on_set(const Visit& visit) {
#ifdef AMP_PATCH_X86
  if constexpr (std::is_same_v<T, float>) {
    switch (instruction_set()) {
      case 2:
        return visit(avx512::Set());
      case 1:
        return visit(avx2::Set());
    }
  }
#endif
  return visit(portable::Set());
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows: n contiguous elements, of a dtype known at run time

struct Row {
  void* data;
  at::ScalarType dtype;
};

// Calls visit(pointer) with the pointer's type. T is the type that the functor computes in.
template <class T, class Visit>
Result typed(const Row& row, const Visit& visit) {
  if constexpr (std::is_same_v<T, double>) {
    return visit(static_cast<double*>(row.data));
  } else if (row.dtype == at::kHalf) {
    return visit(static_cast<c10::Half*>(row.data));
  } else if (row.dtype == at::kBFloat16) {
    return visit(static_cast<c10::BFloat16*>(row.data));
  } else {
    return visit(static_cast<float*>(row.data));
  }
}

// Applies the functor to n elements. rows: the inputs and, if the functor writes, the output. With one input, input and
// output may have any dtypes. With two, the second input and the output are of type T, for example to add gradients to
// FP32 master gradients.
template <class T, size_t N, class Functor, size_t Rows>
Result map_rows(const Functor& f, const std::array<Row, Rows>& rows, int64_t n, bool stream) {
  return on_set<T>([&](auto set) {
    using Set = decltype(set);
    return typed<T>(rows[0], [&](auto* first) {
      if constexpr (!Functor::writes) {
        return Set::template map<false, T>(f, n, static_cast<T*>(nullptr), first);
      } else if constexpr (N == 2) {
        T *second = static_cast<T*>(rows[1].data), *out = static_cast<T*>(rows[2].data);
        return Set::template map<false, T>(f, n, out, first, second);
      } else if constexpr (Functor::reduces) {  // ScaleNorm: input and output are one row
        return Set::template map<false, T>(f, n, first, first);
      } else {
        using From = decltype(first);  // in the lambda below GCC 12 takes it for another type
        return typed<T>(rows[1], [&](auto* out) {
          if constexpr (std::is_same_v<Functor, Copy<T>> && std::is_same_v<From, decltype(out)> &&
                        !std::is_same_v<From, T*>) {
            std::memcpy(out, first, n * sizeof(*out));  // bits: conversion to float and back quiets signalling NaNs
            return Result();
          } else {
            return stream ? Set::template map<true, T>(f, n, out, first)
                          : Set::template map<false, T>(f, n, out, first);
          }
        });
      }
    });
  });
}

// ---------------------------------------------------------------------------------------------------------------------
// A tensor as a sequence of elements

struct View {
  char* data;
  at::ScalarType dtype;
  bool linear;  // contiguous: element i is data[i]
  const at::Tensor* tensor;

  int64_t item() const { return item_size(dtype); }  // bytes
};

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) != 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

// Tells whether tensors that are not all contiguous fill their memory in one common order, for example all
// channels_last, or all transposed alike. They are then processed in the order of memory, otherwise in the order of
// their indices, by strides.
template <size_t N>
bool share_order(const std::array<const at::Tensor*, N>& tensors) {
  for (const at::Tensor* t : tensors) {
    if (!t->is_non_overlapping_and_dense() || !same_layout(*t, *tensors[0])) return false;
  }
  return true;
}

void prefetch(const Fact& f) { prefetch_short(f.data, bytes_of(f)); }

// Calls visit(offset, position, length, stride) for the runs that make up elements [begin, begin + n). A run is
// `length` elements, `stride` apart in memory; the first is at data[offset], and has index `position` among the n.
template <class Visit>
void walk(const View& v, int64_t begin, int64_t n, const Visit& visit) {
  const at::IntArrayRef sizes = v.tensor->sizes(), strides = v.tensor->strides();
  const int64_t last = static_cast<int64_t>(sizes.size()) - 1;
  std::vector<int64_t> index(sizes.size());
  int64_t offset = 0;
  for (int64_t d = last, rest = begin; d >= 0; --d) {
    index[d] = rest % sizes[d];
    rest /= sizes[d];
    offset += index[d] * strides[d];
  }
  for (int64_t position = 0;;) {
    const int64_t length = std::min(sizes[last] - index[last], n - position);
    visit(offset, position, length, strides[last]);
    position += length;
    if (position == n) return;
    offset += length * strides[last];
    index[last] += length;
    for (int64_t d = last; index[d] == sizes[d]; --d) {
      offset += strides[d - 1] - sizes[d] * strides[d];
      index[d] = 0;
      ++index[d - 1];
    }
  }
}

// Copies elements [begin, begin + n) of the tensor into a row (kToRow) or out of it, bits unchanged.
template <bool kToRow, class Bits>
void move_as(const View& v, int64_t begin, int64_t n, void* row) {
  Bits *const data = reinterpret_cast<Bits*>(v.data), *const elements = static_cast<Bits*>(row);
  walk(v, begin, n, [=](int64_t offset, int64_t position, int64_t length, int64_t stride) {
    for (int64_t i = 0; i < length; ++i) {
      Bits &outside = data[offset + i * stride], &inside = elements[position + i];
      kToRow ? inside = outside : outside = inside;
    }
  });
}

template <bool kToRow>
void move(const View& v, int64_t begin, int64_t n, void* row) {
  if (v.item() == 2) return move_as<kToRow, uint16_t>(v, begin, n, row);
  if (v.item() == 4) return move_as<kToRow, uint32_t>(v, begin, n, row);
  move_as<kToRow, uint64_t>(v, begin, n, row);
}

template <class T>
void convert(const Row& from, const Row& to, int64_t n) {
  map_rows<T, 1>(Copy<T>(), std::array<Row, 2>{from, to}, n, false);
}

// Tells whether map_rows takes an operand k of this dtype. If not, it is converted to T first.
template <class T, size_t N>
bool is_known(size_t k, at::ScalarType dtype) {
  return N == 1 || k == 0 || dtype == c10::CppTypeToScalarType<T>::value;
}

// Processes elements [begin, end) of one tensor, if all operands are rows that map_rows takes. The operands are the
// inputs and, if the functor writes, the output.
template <class T, size_t N, class Functor, size_t Operands>
Result run_rows(const Functor& f, const std::array<const Fact*, Operands>& facts, int64_t begin, int64_t end,
                bool stream) {
  std::array<Row, Operands> rows;
  for (size_t k = 0; k < Operands; ++k) {
    rows[k].data = facts[k]->data + begin * item_size(facts[k]->dtype);
    rows[k].dtype = facts[k]->dtype;
  }
  return map_rows<T, N>(f, rows, end - begin, stream && rows[0].data != rows[Operands - 1].data);
}

// Processes elements [begin, end) of one tensor, block by block: operands that are no rows in memory are first gathered
// into buffers, and others converted to T. `order`: all are rows, in one common order.
template <class T, size_t N, class Functor, size_t Views>
Result run_blocks(const Functor& f, const std::array<const Fact*, Views>& facts,
                  const std::array<const at::Tensor*, Views>& tensors, bool order, int64_t begin, int64_t end) {
  std::array<View, Views> views;
  std::array<bool, Views> known;
  for (size_t k = 0; k < Views; ++k) {
    views[k] = {facts[k]->data, facts[k]->dtype, order || facts[k]->contiguous, tensors[k]};
    known[k] = is_known<T, N>(k, facts[k]->dtype);
  }
  std::array<Row, Views> rows;
  const View &input = views[N - 1], &output = views[Views - 1];
  const bool in_place =
      Functor::writes && (input.tensor == output.tensor || (input.data == output.data && input.dtype == output.dtype &&
                                                            input.tensor->strides() == output.tensor->strides()));
  Result result;
  alignas(64) T gathered[Views][kBlock], converted[Views][kBlock];
  for (int64_t lo = begin; lo < end; lo += kBlock) {
    const int64_t n = std::min(kBlock, end - lo);
    std::array<Row, Views> own;  // the block in its own dtype
    for (size_t k = 0; k < Views; ++k) {
      const View& v = views[k];
      own[k] = {v.linear ? static_cast<void*>(v.data + lo * v.item()) : gathered[k], v.dtype};
      if (!v.linear && k < N) move<true>(v, lo, n, gathered[k]);
      rows[k] = known[k] ? own[k] : Row{converted[k], c10::CppTypeToScalarType<T>::value};
      if (!known[k] && k < N) convert<T>(own[k], rows[k], n);
    }
    if (in_place) {  // input and output stay the same row, also if the input was copied into a buffer
      rows[Views - 1] = rows[N - 1];
      own[Views - 1] = own[N - 1];
    }
    const Result block = map_rows<T, N>(f, rows, n, false);
    result.bad |= block.bad;
    result.squares += block.squares;
    if constexpr (Functor::writes) {
      if (!known[Views - 1]) convert<T>(rows[Views - 1], own[Views - 1], n);
      if (!output.linear) move<false>(output, lo, n, own[Views - 1].data);
    }
  }
  return result;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// The loop, with the interface of ops.h

// The sets that this machine can run, the best one last, in the order of on_set's cases.
const std::vector<std::string>& instruction_sets() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> found{"portable"};
#ifdef AMP_PATCH_X86
    __builtin_cpu_init();
    const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("fma");
    if (has_avx2) found.push_back("avx2");
    if (has_avx2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      found.push_back("avx512");
    }
#endif
    return found;
  }();
  return names;
}

static std::atomic<size_t> chosen{instruction_sets().size() - 1};

// Switches to the instruction set of that name; returns the name of the one before.
std::string use_instruction_set(const std::string& name) {
  const auto& names = instruction_sets();
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) throw std::invalid_argument("use_instruction_set: this machine has no " + name);
  return names[chosen.exchange(found - names.begin())];
}

size_t instruction_set() { return chosen.load(std::memory_order_relaxed); }

// Returns the FP32 gradients [2, n] of weight and bias. `grads` and `inputs` have one low-precision type and rows of n
// elements; `means` and `deviations` have an element for each row. Each thread adds rows of its own.
// amp_patch/casts/low_sums.py says why torch's kernel is not used.
at::Tensor layer_norm_sums(const at::Tensor& grads, const at::Tensor& inputs, const at::Tensor& means,
                           const at::Tensor& deviations, int64_t n) {
  const at::Tensor grad = grads.reshape({-1, n}).contiguous(), x = inputs.reshape({-1, n}).contiguous();
  const at::Tensor mean = means.reshape(-1).to(at::kFloat), deviation = deviations.reshape(-1).to(at::kFloat);
  const int64_t rows = grad.size(0), grain = std::max<int64_t>(1, kGrain / n);
  TORCH_CHECK(grad.is_cpu() && grad.dtype() == x.dtype() && x.size(0) == rows && mean.numel() == rows &&
                  deviation.numel() == rows,
              "layer_norm_sums: the arguments have no common type or number of rows");
  at::Tensor sums = at::zeros({at::get_num_threads(), 2, n}, at::kFloat);
  float* const totals = sums.mutable_data_ptr<float>();
  const float *const m = mean.const_data_ptr<float>(), *const d = deviation.const_data_ptr<float>();
  const auto run = [&](auto element) {
    using Low = decltype(element);
    const Low *const g = grad.const_data_ptr<Low>(), *const v = x.const_data_ptr<Low>();
    at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
      float* const own = totals + 2 * n * at::get_thread_num();
      on_set<float>([&](auto set) {
        set.add_norm_rows(end - begin, n, g + begin * n, v + begin * n, m + begin, d + begin, own, own + n);
        return Result();
      });
    });
  };
  grad.scalar_type() == at::kHalf ? run(c10::Half()) : run(c10::BFloat16());  // another type raises
  return sums.sum(0);
}

struct CpuLoop {
  static constexpr c10::DeviceType device = c10::DeviceType::CPU;
  static constexpr bool reads_late = false;

  // Processes elements [begin, end) of tensor i of the lists.
  template <class T, int N, class Functor, size_t Operands>
  static Result run_chunk(const Job<N>& job, Functor f, int64_t i, const std::array<const Fact*, Operands>& facts,
                          int64_t begin, int64_t end, bool stream) {
    f.prepare(facts[0]->dtype, facts[Operands - 1]->dtype);
    bool known = true, contiguous = true;
    for (size_t k = 0; k < Operands; ++k) {
      known = known && is_known<T, N>(k, facts[k]->dtype);
      contiguous = contiguous && facts[k]->contiguous;
    }
    if (known && contiguous) return run_rows<T, N>(f, facts, begin, end, stream);
    std::array<const at::Tensor*, Operands> tensors;
    for (size_t k = 0; k < N; ++k) tensors[k] = &(*job.in[k])[i];
    if constexpr (Functor::writes) tensors[N] = &(*job.out)[i];
    const bool order = contiguous || share_order(tensors);
    if (known && order) return run_rows<T, N>(f, facts, begin, end, stream);
    return run_blocks<T, N>(f, facts, tensors, order, begin, end);
  }

  template <class T, int N, class Functor>
  static void run(const Job<N>& job, const Functor& f) {
    constexpr size_t kViews = N + (Functor::writes ? 1 : 0);  // inputs, then the output
    const auto facts_of = [&](int64_t i) {
      std::array<const Fact*, kViews> facts;
      for (size_t k = 0; k < N; ++k) facts[k] = &(*job.in_facts[k])[i];
      if constexpr (Functor::writes) facts[N] = &(*job.out_facts)[i];
      return facts;
    };
    std::vector<int64_t> sizes;
    sizes.reserve(job.indices.size());
    int64_t written = 0;
    for (const int64_t i : job.indices) {
      const auto facts = facts_of(i);
      sizes.push_back(facts[0]->numel);
      if constexpr (Functor::writes) written += bytes_of(*facts[N]);
    }
    const bool stream = written >= kStreamed;

    const CpuChunks chunks(sizes);
    std::vector<double> squares(Functor::reduces ? chunks.size() : 0);
    std::atomic<bool> bad{false};
    chunks.for_each(
        kGrain,
        [&](int64_t slot) {
          for (const Fact* f : facts_of(job.indices[slot])) prefetch(*f);
        },
        [&](int64_t c, int64_t slot, int64_t begin, int64_t end) {
          const int64_t i = job.indices[slot];
          const Result result = run_chunk<T, N>(job, f, i, facts_of(i), begin, end, stream);
          if (result.bad) bad.store(true, std::memory_order_relaxed);
          if constexpr (Functor::reduces) squares[c] = result.squares;
        });
    if (bad && job.found_inf != nullptr) *job.found_inf = 1.0f;
    for (size_t c = 0; c < squares.size(); ++c) job.squares[job.indices[chunks.slot(c)]] += squares[c];
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

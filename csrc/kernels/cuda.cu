// The loop on CUDA: the ops of ops.h over it are the kernels for CUDA tensors. A job takes one launch for all its rows
// that are linear in memory, and one for all strided rows.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "chunk.h"
#include "cuda_launch.h"
#include "ops.h"

namespace amp_patch {
namespace {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#error "amp_patch's kernels need sm_70 or newer: leave older ones out of TORCH_CUDA_ARCH_LIST"
#endif

// ---------------------------------------------------------------------------------------------------------------------
// On the device

// The sum over a block, in an order that depends only on kThreads. Valid in thread 0.
__device__ double block_sum(double value) {
  __shared__ double sums[kThreads];
  sums[threadIdx.x] = value;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  return sums[0];  // complete in thread 0, which wrote it last: no barrier follows
}

// Four blocks per multiprocessor: their loads hide each other's latency, and 64 registers per thread are enough.
template <class T, int N, class F, class R, int kBytes>
__global__ void __launch_bounds__(kThreads, R::kResident)
    run_chunks(const __grid_constant__ Arguments<R, kBytes> arguments, const R* buffer, int count, int chunk, F f,
               float* found_inf, double* partials) {
  const R* rows = buffer != nullptr ? buffer : arguments.rows;
  const Outcome outcome = run_chunk<T, N>(f, rows, count, chunk, blockIdx.x, static_cast<int>(threadIdx.x));
  if constexpr (F::watches) {
    if (outcome.bad && found_inf != nullptr) *found_inf = 1.0f;  // no atomic: threads that race write the same
  }
  if constexpr (F::reduces) {
    const double sum = block_sum(outcome.sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
  }
}

// squares[row's tensor] += its chunks' partial sums, in a fixed order; one block per row.
template <class R, int kBytes>
__global__ void __launch_bounds__(kThreads)
    add_partials(const __grid_constant__ Arguments<R, kBytes> arguments, const R* buffer, int count, uint32_t chunks,
                 const double* partials, double* squares) {
  const R* rows = buffer != nullptr ? buffer : arguments.rows;
  const int slot = static_cast<int>(blockIdx.x);
  const uint32_t end = slot + 1 < count ? rows[slot + 1].first : chunks;
  double sum = 0;
  for (uint32_t i = rows[slot].first + threadIdx.x; i < end; i += kThreads) sum += partials[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) squares[rows[slot].index] += sum;
}

template <class F>
__global__ void run_once(F f) {
  f();
}

// ---------------------------------------------------------------------------------------------------------------------
// On the host

// Launches the kernels over a job's rows of one type, Row or StridedRow.
template <class T, int N, class F, class R>
void launch_job(std::vector<R> rows, const Job<N>& job, const F& f, c10::Device device) {
  static_assert(sizeof(F) + 64 <= 256, "the arguments beside the rows");
  // For float64, which is rare, only kernels with few bytes of arguments are compiled.
  constexpr int kMostBytes = std::is_same_v<T, double> ? kFewBytes : kManyBytes;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index());
  launch_rows<kMostBytes>(
      std::move(rows), device, stream, [&](const auto& arguments, const R* buffer, const Extent& extent) {
        using A = std::decay_t<decltype(arguments)>;
        at::Tensor partials;
        double* sums = nullptr;
        if constexpr (F::reduces) {
          partials = at::empty({extent.blocks}, at::TensorOptions().dtype(at::kDouble).device(device));
          sums = partials.mutable_data_ptr<double>();
        }
        run_chunks<T, N, F, R, A::bytes><<<static_cast<unsigned>(extent.blocks), kThreads, 0, stream>>>(
            arguments, buffer, extent.rows, extent.chunk, f, job.found_inf, sums);
        C10_CUDA_KERNEL_LAUNCH_CHECK();
        if constexpr (F::reduces) {
          add_partials<R, A::bytes><<<static_cast<unsigned>(extent.rows), kThreads, 0, stream>>>(
              arguments, buffer, extent.rows, static_cast<uint32_t>(extent.blocks), sums, job.squares);
          C10_CUDA_KERNEL_LAUNCH_CHECK();
        }
      });
}

// The row at place i of the lists, if all its tensors are contiguous.
template <int K, int N>
std::optional<Row<K>> contiguous_row_of(const Job<N>& job, int64_t i) {
  std::array<void*, K> data;
  std::array<c10::ScalarType, K> dtype;
  for (int k = 0; k < K; ++k) {
    const Fact& fact = (k < N ? *job.in_facts[std::min(k, N - 1)] : *job.out_facts)[i];
    if (!fact.contiguous) return std::nullopt;
    data[k] = fact.data;
    dtype[k] = fact.dtype;
  }
  return contiguous_row<K>(data, dtype, (*job.in_facts[0])[i].numel, i);
}

View view(const at::Tensor& t) {
  return {const_cast<void*>(t.const_data_ptr()), t.scalar_type(), t.dim(), t.sizes().data(), t.strides().data()};
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// The loop, with the interface of ops.h

struct CudaLoop {
  static constexpr c10::DeviceType device = c10::DeviceType::CUDA;
  static constexpr bool reads_late = true;

  template <class T, int N, class F>
  static void run(const Job<N>& job, const F& f) {
    constexpr int K = N + (F::writes ? 1 : 0);  // tensors of a row: the inputs, then the output
    const c10::Device where = (*job.in[0])[job.indices[0]].device();
    const c10::cuda::CUDAGuard guard(where);
    const c10::NoGradGuard no_grad;

    std::vector<Row<K>> linear;
    std::vector<StridedRow<K>> strided;
    linear.reserve(job.indices.size());
    std::vector<at::Tensor> dense;                              // copies of tensors with too many dimensions
    std::vector<std::pair<at::Tensor, at::Tensor>> write_back;  // (output, its copy)
    StridedRow<K> row;
    for (const int64_t i : job.indices) {
      if (const std::optional<Row<K>> known = contiguous_row_of<K>(job, i)) {
        linear.push_back(*known);
        continue;
      }
      std::array<const at::Tensor*, K> tensors;
      for (int n = 0; n < N; ++n) tensors[n] = &(*job.in[n])[i];
      if constexpr (F::writes) tensors[K - 1] = &(*job.out)[i];
      std::array<View, K> views;
      for (int k = 0; k < K; ++k) views[k] = view(*tensors[k]);
      Layout layout = place<K>(views, i, row);
      if (layout == Layout::kScattered) {
        const size_t begin = dense.size();
        for (int n = 0; n < N; ++n) dense.push_back(tensors[n]->contiguous());
        if constexpr (F::writes) {
          dense.push_back(at::empty(tensors[K - 1]->sizes(), tensors[K - 1]->options()));
          write_back.emplace_back(*tensors[K - 1], dense.back());
        }
        for (int k = 0; k < K; ++k) views[k] = view(dense[begin + k]);
        layout = place<K>(views, i, row);
      }
      if (layout == Layout::kLinear) {
        linear.push_back(row);
      } else {
        strided.push_back(row);
      }
    }
    launch_job<T, N>(std::move(linear), job, f, where);
    launch_job<T, N>(std::move(strided), job, f, where);
    for (const auto& [out, copy] : write_back) out.copy_(copy, /*non_blocking=*/true);
  }

  static at::Tensor total(const at::Tensor& squares) { return squares.sum(); }

  template <class F>
  static void once(const F& f) {
    run_once<<<1, 1, 0, c10::cuda::getCurrentCUDAStream()>>>(f);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

template struct Ops<CudaLoop>;

// The way rows get to the kernels, for tests and measurements: "auto", "arguments" or "buffer".
void choose_metadata(const std::string& route) {
  if (route == "auto") {
    metadata = Metadata::kAuto;
  } else if (route == "arguments") {
    metadata = Metadata::kArguments;
  } else if (route == "buffer") {
    metadata = Metadata::kBuffer;
  } else {
    throw std::invalid_argument("cuda_metadata: " + route + " is none of auto, arguments, buffer");
  }
}

}  // namespace amp_patch

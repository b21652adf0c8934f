// The loop on CUDA: ops.h's ops over it are the kernels for CUDA tensors. A job takes one launch for all its rows that
// are linear in memory, and one for those that are strided.
//
// A launch learns of its rows in one of two ways. As kernel arguments, which CUDA copies at the launch, and into a
// graph that is being captured: nothing to keep alive. Or, where they do not fit, through one pinned buffer, copied on
// the stream; torch's allocators keep the buffer until the copy is done and the device's side until the kernel is. A
// captured copy would read the host's side again at each replay, so a capture takes arguments, in several launches.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <limits>

#include "chunk.h"
#include "ops.h"

namespace amp_patch {
namespace {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 700
#error "amp_patch's kernels need sm_70 or newer: leave older ones out of TORCH_CUDA_ARCH_LIST"
#endif

// Bytes of kernel arguments: CUDA 12.1 and later take 32,764 on sm_70 and newer, earlier ones 4,096. 256 of them are
// for the arguments beside the rows.
constexpr int kFewBytes = 4096 - 256;
constexpr int kManyBytes = CUDART_VERSION >= 12010 ? 32764 - 256 : kFewBytes;

template <class R, int kBytes>
struct Arguments {
  static constexpr int capacity = kBytes / sizeof(R);
  R rows[capacity];
};

// ---------------------------------------------------------------------------------------------------------------------
// On the device

// The sum over a block, in an order that depends on nothing but kThreads. Valid in thread 0.
__device__ double block_sum(double value) {
  __shared__ double sums[kThreads];
  sums[threadIdx.x] = value;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  return sums[0];  // thread 0 wrote it
}

// Four blocks a multiprocessor: their loads hide one another's latency, and 64 registers a thread are enough.
template <class T, int N, class F, class R, int kBytes>
__global__ void __launch_bounds__(kThreads, 4)
    run_chunks(const __grid_constant__ Arguments<R, kBytes> arguments, const R* buffer, int count, int chunk, F f,
               float* found_inf, double* partials) {
  const R* rows = buffer != nullptr ? buffer : arguments.rows;
  const Outcome outcome = run_chunk<T, N>(f, rows, count, chunk, blockIdx.x, static_cast<int>(threadIdx.x));
  if constexpr (F::watches) {
    if (outcome.bad && found_inf != nullptr) *found_inf = 1.0f;  // whoever races here writes the same
  }
  if constexpr (F::reduces) {
    const double sum = block_sum(outcome.sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
  }
}

// squares[row's tensor] += its chunks' partial sums, in a fixed order; a block a row.
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

enum class Metadata { kAuto, kArguments, kBuffer };
std::atomic<Metadata> metadata{Metadata::kAuto};

// A newer runtime may meet an older driver.
bool driver_takes_large_arguments() {
  static const bool takes = [] {
    int version = 0;
    C10_CUDA_CHECK(cudaDriverGetVersion(&version));
    return version >= 12010;
  }();
  return takes;
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    (void)cudaGetLastError();  // the legacy stream, while another one captures: do as in a capture
    return true;
  }
  return status != cudaStreamCaptureStatusNone;
}

// The launches of one job's rows of one kind; what is the same for all of them.
template <class T, int N, class F, class R>
class Launcher {
 public:
  Launcher(const std::vector<R>& rows, const Job<N>& job, const F& f, c10::Device device)
      : rows_(rows), job_(job), f_(f), device_(device), stream_(c10::cuda::getCurrentCUDAStream(device.index())) {
    std::vector<int64_t> sizes;
    sizes.reserve(rows.size());
    for (const R& row : rows) sizes.push_back(row.size);
    chunk_ = chunk_size(sizes);

    constexpr int64_t few = Arguments<R, kFewBytes>::capacity, many = Arguments<R, kMostBytes>::capacity;
    const auto count = static_cast<int64_t>(rows.size());
    const int64_t most = driver_takes_large_arguments() ? many : few;
    const Metadata route = metadata.load();
    const bool fits = count <= most && route != Metadata::kBuffer;
    if (!fits && route != Metadata::kArguments && !is_capturing(stream_)) {
      for (const auto& spans : plan_spans(sizes, chunk_, count, kMaxBlocks)) from_buffer(spans);
    } else if (count <= few || most == few) {
      for (const auto& spans : plan_spans(sizes, chunk_, few, kMaxBlocks)) from_arguments<kFewBytes>(spans);
    } else {
      for (const auto& spans : plan_spans(sizes, chunk_, many, kMaxBlocks)) from_arguments<kMostBytes>(spans);
    }
  }

 private:
  static constexpr int64_t kMaxBlocks = std::numeric_limits<int32_t>::max();  // of a grid's x
  // float64 is rare, and not worth a second set of kernels.
  static constexpr int kMostBytes = std::is_same_v<T, double> ? kFewBytes : kManyBytes;

  template <int kBytes>
  void from_arguments(const std::vector<Span>& spans) {
    Arguments<R, kBytes> arguments;
    const int64_t blocks = fill(arguments.rows, rows_, spans, chunk_);
    launch(arguments, nullptr, spans.size(), blocks);
  }

  void from_buffer(const std::vector<Span>& spans) {
    const auto bytes = static_cast<int64_t>(spans.size() * sizeof(R));
    const auto options = at::TensorOptions().dtype(at::kByte);
    const at::Tensor host = at::empty({bytes}, options.device(at::kCPU).pinned_memory(true));
    const at::Tensor buffer = at::empty({bytes}, options.device(device_));
    const int64_t blocks = fill(static_cast<R*>(host.mutable_data_ptr()), rows_, spans, chunk_);
    buffer.copy_(host, /*non_blocking=*/true);
    launch(Arguments<R, kFewBytes>(), static_cast<const R*>(buffer.const_data_ptr()), spans.size(), blocks);
  }

  template <int kBytes>
  void launch(const Arguments<R, kBytes>& arguments, const R* buffer, size_t spans, int64_t blocks) {
    static_assert(std::is_trivially_copyable_v<Arguments<R, kBytes>> && sizeof(arguments) <= kBytes);
    static_assert(sizeof(F) + 64 <= 256, "the arguments beside the rows");
    const auto count = static_cast<int>(spans);
    at::Tensor partials;
    double* sums = nullptr;
    if constexpr (F::reduces) {
      partials = at::empty({blocks}, at::TensorOptions().dtype(at::kDouble).device(device_));
      sums = partials.mutable_data_ptr<double>();
    }
    run_chunks<T, N, F, R, kBytes><<<static_cast<unsigned>(blocks), kThreads, 0, stream_>>>(
        arguments, buffer, count, static_cast<int>(chunk_), f_, job_.found_inf, sums);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    if constexpr (F::reduces) {
      add_partials<R, kBytes><<<static_cast<unsigned>(spans), kThreads, 0, stream_>>>(
          arguments, buffer, count, static_cast<uint32_t>(blocks), sums, job_.squares);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
  }

  const std::vector<R>& rows_;
  const Job<N>& job_;
  const F& f_;
  c10::Device device_;
  cudaStream_t stream_;
  int64_t chunk_;
};

View view(const at::Tensor& t) {
  return {const_cast<void*>(t.const_data_ptr()), t.scalar_type(), t.dim(), t.sizes().data(), t.strides().data()};
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// The loop, as ops.h wants it

struct CudaLoop {
  static constexpr c10::DeviceType device = c10::DeviceType::CUDA;

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
    if (!linear.empty()) Launcher<T, N, F, Row<K>>(linear, job, f, where);
    if (!strided.empty()) Launcher<T, N, F, StridedRow<K>>(strided, job, f, where);
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

// How launches learn of their rows, for tests and measurements: "auto", "arguments" or "buffer".
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

// csrc's .cu files, launches and all, as a compiler of the host takes them. tests/multi_tensor/test_cuda_on_host.py
// writes copies of the sources whose launches call host::launch, and compiles this file beside them: CPU tensors act
// those of a GPU.
#include <torch/extension.h>
#include <ucontext.h>

#include <functional>
#include <memory>

// ---------------------------------------------------------------------------------------------------------------------
// CUDA's language and runtime, as far as the sources use them

#define __global__
#define __device__
#define __shared__ static  // blocks run one after the other
#define __launch_bounds__(...)
#define __grid_constant__
#define __syncthreads() host::barrier()
#define __shfl_xor_sync(mask, own, other) host::of_lane(own, other)
#define CUDART_VERSION 13000
#define C10_CUDA_CHECK(call) TORCH_CHECK((call) == cudaSuccess)
#define C10_CUDA_KERNEL_LAUNCH_CHECK() host::check_launch()

enum cudaError_t { cudaSuccess, cudaErrorInvalidConfiguration };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
using cudaStream_t = int;

namespace {
struct {
  unsigned x;
} blockIdx, threadIdx;
}  // namespace

namespace host {

// What a test sets and reads.
bool capturing = false, steps_on_host = false, backwards = false;
int64_t fails_at = -1;            // which allocation or launch fails
int64_t most_blocks = INT32_MAX;  // of a launch
int64_t allocations = 0, launches = 0, barriers = 0;

int64_t guards = 0;
cudaError_t last_error = cudaSuccess;

void begin(int64_t& counter) {
  TORCH_CHECK(allocations + launches != fails_at, "out of memory, says the test");
  ++counter;
}

at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  TORCH_CHECK(!capturing || options.device().is_cpu(), "pinned memory in a capture");
  begin(allocations);
  return at::empty(sizes, options);
}

void check_launch() {
  const cudaError_t error = std::exchange(last_error, cudaSuccess);
  TORCH_CHECK(error == cudaSuccess, "CUDA error: invalid configuration argument");
}

// The threads of a block take turns, each until it waits for the others.
constexpr int kMostThreads = 1024;
constexpr size_t kStack = 1 << 18;
ucontext_t scheduler, contexts[kMostThreads];
bool done[kMostThreads];
int running;
const std::function<void()>* body;

void wait_for_the_block() { swapcontext(&contexts[running], &scheduler); }

void barrier() {
  if (running == 0) ++barriers;
  wait_for_the_block();
}

// The block waits, not only the warp: all of its threads come here equally often.
uint32_t of_lane(uint32_t own, int other) {
  static uint32_t values[kMostThreads];
  values[running] = own;
  wait_for_the_block();
  const uint32_t found = values[running ^ other];
  wait_for_the_block();
  return found;
}

void run_thread() {
  (*body)();
  done[running] = true;
  wait_for_the_block();
}

void run_block(int threads, const std::function<void()>& work) {
  static const std::unique_ptr<char[]> stacks(new char[kMostThreads * kStack]);
  body = &work;
  for (int t = 0; t < threads; ++t) {
    done[t] = false;
    getcontext(&contexts[t]);
    contexts[t].uc_stack = {stacks.get() + t * kStack, 0, kStack};
    contexts[t].uc_link = nullptr;
    makecontext(&contexts[t], run_thread, 0);
  }
  for (bool left = true; left;) {
    left = false;
    for (int i = 0; i < threads; ++i) {
      const int t = backwards ? threads - 1 - i : i;
      if (done[t]) continue;
      running = t;
      threadIdx.x = static_cast<unsigned>(t);
      swapcontext(&scheduler, &contexts[t]);
      left = left || !done[t];
    }
  }
}

template <class Kernel, class... A>
void launch(int64_t blocks, int threads, int, cudaStream_t stream, const Kernel& kernel, const A&... arguments) {
  TORCH_CHECK(stream == 7, "another stream than the current one");
  TORCH_CHECK(guards > 0 || threads == 1, "whichever device is current");  // update_scale has torch's own guard
  begin(launches);
  if (blocks < 1 || blocks > INT32_MAX || threads < 1 || threads > kMostThreads) {
    last_error = cudaErrorInvalidConfiguration;
    return;
  }
  for (int64_t b = 0; b < blocks; ++b) {
    blockIdx.x = static_cast<unsigned>(backwards ? blocks - 1 - b : b);
    run_block(threads, [&] { kernel(arguments...); });
  }
}

}  // namespace host

inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = host::capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

namespace c10::cuda {
struct CUDAGuard {
  explicit CUDAGuard(c10::Device) { ++host::guards; }
  ~CUDAGuard() { --host::guards; }
};
inline cudaStream_t getCurrentCUDAStream(c10::DeviceIndex = -1) { return 7; }
}  // namespace c10::cuda

#include "cuda.cu"
#include "steps_cuda.cu"

// ---------------------------------------------------------------------------------------------------------------------
// As bindings.cpp has them

namespace amp_patch {
namespace {

using List = std::vector<at::Tensor>;

template <class P>
struct Held {
  const std::decay_t<P>& value;
  operator const std::decay_t<P>&() const { return value; }
};
template <>
struct Held<const Tensors&> {
  Tensors tensors;
  explicit Held(const List& list) {
    for (const at::Tensor& t : list) tensors.push_back(t);
  }
  operator const Tensors&() const { return tensors; }
};

template <class P>
using Given = std::conditional_t<std::is_same_v<P, const Tensors&>, List, std::decay_t<P>>;

template <class Return, class... P>
auto bound(Return (*op)(P...)) {
  return [op](const Given<P>&... given) -> Return { return op(Held<P>{given}...); };
}

}  // namespace
}  // namespace amp_patch

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace amp_patch;
  py::register_local_exception<Refused>(m, "Refused", PyExc_ValueError);
  m.attr("devices") = py::make_tuple("cpu");
  m.def("scale", bound(&Ops<CudaLoop>::scale));
  m.def("unscale", bound(&Ops<CudaLoop>::unscale));
  m.def("axpby", bound(&Ops<CudaLoop>::axpby));
  m.def("check_finite", bound(&Ops<CudaLoop>::check_finite));
  m.def("l2norm", bound(&Ops<CudaLoop>::l2norm));
  m.def("unscale_l2norm", bound(&Ops<CudaLoop>::unscale_l2norm));
  m.def("adopt", bound(&Ops<CudaLoop>::adopt));
  m.def("update_scale", bound(&Ops<CudaLoop>::update_scale));
  m.def("adam", bound(&Steps<CudaSteps>::adam));
  m.def("sgd", bound(&Steps<CudaSteps>::sgd));
  m.def("split", bound(&Steps<CudaSteps>::split));
  m.def("join", bound(&Steps<CudaSteps>::join));
  m.def("stochastic_round", bound(&Steps<CudaSteps>::stochastic_round));
  m.def("encode", bound(&Steps<CudaSteps>::encode));
  m.def("decode", bound(&Steps<CudaSteps>::decode));
  m.def("cuda_metadata", &choose_metadata);
  m.def("capture", [](bool on) { host::capturing = on; });
  m.def("steps_on_host", [](bool on) { host::steps_on_host = on; });
  m.def("run_backwards", [](bool on) { host::backwards = on; });
  m.def("most_blocks", [](int64_t count) { host::most_blocks = count; });
  m.def("fail_at", [](int64_t event) {
    host::fails_at = event;
    host::allocations = host::launches = 0;
  });
  m.def("barriers", [] { return host::barriers; });
  m.def("seen", [] { return std::make_pair(host::allocations, host::launches); });  // since fail_at
}

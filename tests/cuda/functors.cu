// Compiled by tests/cuda/compile.sh, never run: every functor of csrc/functors.h is device code, and csrc/plan.h, a
// host header, passes through nvcc.
#include "../../csrc/functors.h"
#include "../../csrc/plan.h"

namespace amp_patch {

template <class T, class F>
__global__ void one_input(F f, const T* x, T* out, float* found_inf, c10::ScalarType dtype) {
  f.prepare(dtype, dtype);
  const T value = f(x[threadIdx.x]);
  if (f.bad(value, x[threadIdx.x])) *found_inf = 1.0f;
  if constexpr (F::writes) out[threadIdx.x] = value;
  if constexpr (F::reduces) out[threadIdx.x] += f.term(value);
}

template <class T, class F>
__global__ void two_inputs(F f, const T* x, const T* y, T* out, float* found_inf, c10::ScalarType dtype) {
  f.prepare(dtype, dtype);
  const T value = f(x[threadIdx.x], y[threadIdx.x]);
  if (f.bad(value, x[threadIdx.x], y[threadIdx.x])) *found_inf = 1.0f;
  out[threadIdx.x] = value;
}

__global__ void once(UpdateScale f) { f(); }

template <class T>
void instantiate(T* p, float* flag, c10::ScalarType dtype) {
  const Scalar<T> scalar{T(1), nullptr, nullptr};
  one_input<<<1, 32>>>(Scale<T>{scalar, T(0)}, p, p, flag, dtype);
  one_input<<<1, 32>>>(ScaleNorm<T>{{scalar, T(0)}}, p, p, flag, dtype);
  one_input<<<1, 32>>>(Copy<T>{}, p, p, flag, dtype);
  one_input<<<1, 32>>>(CheckFinite<T>{}, p, p, flag, dtype);
  one_input<<<1, 32>>>(Norm<T>{}, p, p, flag, dtype);
  two_inputs<<<1, 32>>>(Axpby<T>{scalar, scalar, true, false, T(0)}, p, p, p, flag, dtype);
  two_inputs<<<1, 32>>>(Adopt<T>{dtype}, p, p, p, flag, dtype);
}

template void instantiate<float>(float*, float*, c10::ScalarType);
template void instantiate<double>(double*, float*, c10::ScalarType);

void instantiate_once(UpdateScale f) { once<<<1, 1>>>(f); }

size_t count(const std::vector<int64_t>& sizes) { return plan(sizes, 65536, 110, 320).size(); }

}  // namespace amp_patch

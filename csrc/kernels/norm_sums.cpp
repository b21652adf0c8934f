// The gradients of a layer norm's weight and bias on the CPU, from FP16 or BF16: amp_patch/casts/low_sums.py says why.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define AMP_PATCH_X86 1
#include <immintrin.h>
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // wrong, in GCC 12's own headers: gcc.gnu.org/PR105593
#endif

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cstring>

#include "cpu_chunks.h"
#include "functors.h"

namespace amp_patch {
namespace {

namespace portable {
#define AMP_PATCH_WIDTH 1
#include "norm_vectors.h"
#undef AMP_PATCH_WIDTH
}  // namespace portable

#ifdef AMP_PATCH_X86
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
namespace avx2 {
#define AMP_PATCH_WIDTH 8
#include "norm_vectors.h"
#undef AMP_PATCH_WIDTH
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")
namespace avx512 {
#define AMP_PATCH_WIDTH 16
#include "norm_vectors.h"
#undef AMP_PATCH_WIDTH
}  // namespace avx512
#pragma GCC pop_options
#endif

template <class Low, class... Arguments>
void add(Arguments... arguments) {
#ifdef AMP_PATCH_X86
  switch (instruction_set()) {
    case 2:
      return avx512::NormSums::add<Low>(arguments...);
    case 1:
      return avx2::NormSums::add<Low>(arguments...);
  }
#endif
  portable::NormSums::add<Low>(arguments...);
}

}  // namespace

// Returns the FP32 gradients [2, n] of weight and bias. `grads` and `inputs` have one low-precision type and rows of n
// elements; `means` and `deviations` have an element for each row. Each thread adds rows of its own.
at::Tensor layer_norm_sums(const at::Tensor& grads, const at::Tensor& inputs, const at::Tensor& means,
                           const at::Tensor& deviations, int64_t n) {
  const at::Tensor grad = grads.reshape({-1, n}).contiguous(), x = inputs.reshape({-1, n}).contiguous();
  const at::Tensor mean = means.reshape(-1).to(at::kFloat), deviation = deviations.reshape(-1).to(at::kFloat);
  const int64_t rows = grad.size(0), grain = std::max<int64_t>(1, 32768 / n);
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
      add<Low>(end - begin, n, g + begin * n, v + begin * n, m + begin, d + begin, own, own + n);
    });
  };
  grad.scalar_type() == at::kHalf ? run(c10::Half()) : run(c10::BFloat16());  // another type raises
  return sums.sum(0);
}

}  // namespace amp_patch

// The optimizers' steps on CUDA: the functions of step_ops.h over this loop. One launch counts the steps and computes
// each tensor's rates, and one does all the work; a capture of very many tensors takes more.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>

#include "cuda_launch.h"
#include "step_chunk.h"
#include "step_ops.h"

namespace amp_patch {
namespace {

__device__ bool is_skipped(const float* found_inf) { return found_inf != nullptr && *found_inf != 0; }

// One thread per row.
template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    count_steps(const __grid_constant__ Arguments<StepBlocks, kBytes> arguments, const StepBlocks* buffer, int count,
                AdamRule rule, const float* found_inf, AdamRates* rates) {
  const StepBlocks* rows = buffer != nullptr ? buffer : arguments.rows;
  const int slot = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (slot < count && rows[slot].begins && !is_skipped(found_inf)) {
    rates[rows[slot].index] = rule.count(rows[slot].step);
  }
}

template <class F, class Rule, int kBytes, bool kRounds>
__global__ void __launch_bounds__(kThreads, 4)
    run_steps(const __grid_constant__ Arguments<StepBlocks, kBytes> arguments, const StepBlocks* buffer, int count,
              int chunk, StepWork<F, kRounds> work, Rule rule, UnscaleRule unscale, const float* found_inf,
              const typename F::Rates* rates) {
  if (is_skipped(found_inf)) return;
  const StepBlocks* rows = buffer != nullptr ? buffer : arguments.rows;
  const StepBlocks& row = rows[row_of(rows, count, blockIdx.x)];
  work.f.unscale = unscale.unscale();
  if constexpr (Rule::kCounts) {
    work.rates = rates[row.index];
  } else {
    work.rates = rule.rates();
  }
  run_step_chunk(work, row, chunk, blockIdx.x, static_cast<int>(threadIdx.x));
}

template <class Work, int kBytes>
__global__ void __launch_bounds__(kThreads, 4)
    run_conversion(const __grid_constant__ Arguments<StepBlocks, kBytes> arguments, const StepBlocks* buffer, int count,
                   int chunk, Work work) {
  const StepBlocks* rows = buffer != nullptr ? buffer : arguments.rows;
  run_step_chunk(work, rows[row_of(rows, count, blockIdx.x)], chunk, blockIdx.x, static_cast<int>(threadIdx.x));
}

// A copy on the device of step counts that are on the CPU, because kernels cannot read memory of the CPU.
at::Tensor copy_steps(const StepJob& job, std::vector<StepBlocks>& blocks) {
  const auto count = static_cast<int64_t>(job.rows.size());
  const auto options = at::TensorOptions().dtype(at::kFloat);
  const at::Tensor host = at::empty({count}, options.device(at::kCPU).pinned_memory(true));
  const at::Tensor copy = at::empty({count}, options.device(job.device));
  float* const values = host.mutable_data_ptr<float>();
  for (int64_t i = 0; i < count; ++i) values[i] = *job.rows[i].step;
  copy.copy_(host, /*non_blocking=*/true);
  for (StepBlocks& row : blocks) row.step = copy.mutable_data_ptr<float>() + row.index;
  return copy;
}

}  // namespace

struct CudaSteps {
  static constexpr c10::DeviceType device = c10::DeviceType::CUDA;
  static constexpr bool reads_late = true;

  // Returns whether the step may have written anything. Only the device knows if found_inf has prevented that.
  template <class F, class Rule>
  static bool step(const StepJob& job, const F& f, const Rule& rule) {
    static_assert(sizeof(StepWork<F, true>) + sizeof(Rule) + sizeof(UnscaleRule) + 32 <= 256, "beside the rows");
    const c10::cuda::CUDAGuard guard(job.device);
    const c10::NoGradGuard no_grad;
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(job.device.index());
    require(!job.host_steps || !is_capturing(stream), "steps on the host in a capture");
    std::vector<StepBlocks> rows = blocks_of(job.rows);
    const bool all = rows.size() == job.rows.size();
    const bool rounds = std::any_of(job.rows.begin(), job.rows.end(),
                                    [](const StepRow& row) { return row.dtype[kParam] == at::kBFloat16; });
    at::Tensor steps, rates;
    if (job.host_steps) steps = copy_steps(job, rows);
    if constexpr (Rule::kCounts) {
      const auto bytes = static_cast<int64_t>(job.rows.size() * sizeof(AdamRates));
      rates = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(job.device));
    }
    auto* const own = rates.defined() ? static_cast<typename Rule::Rates*>(rates.mutable_data_ptr()) : nullptr;
    const auto count = [&](const auto& arguments, const StepBlocks* buffer, const Extent& extent) {
      if constexpr (Rule::kCounts) {
        constexpr int kBytes = std::decay_t<decltype(arguments)>::bytes;
        count_steps<kBytes><<<(extent.rows + kThreads - 1) / kThreads, kThreads, 0, stream>>>(
            arguments, buffer, extent.rows, rule, job.found_inf, own);
        C10_CUDA_KERNEL_LAUNCH_CHECK();
      }
    };
    // Rows without elements first: if memory is short, their launch fails before a weight is written.
    if (Rule::kCounts && !job.host_steps && !all) {
      launch_rows<kManyBytes>(blocks_of(job.rows, true), job.device, stream, count);
    }
    launch_rows<kManyBytes>(std::move(rows), job.device, stream,
                            [&](const auto& arguments, const StepBlocks* buffer, const Extent& extent) {
                              constexpr int kBytes = std::decay_t<decltype(arguments)>::bytes;
                              count(arguments, buffer, extent);
                              const auto run = [&](auto rounds) {
                                constexpr bool kRounds = decltype(rounds)::value;
                                run_steps<F, Rule, kBytes, kRounds>
                                    <<<static_cast<unsigned>(extent.blocks), kThreads, 0, stream>>>(
                                        arguments, buffer, extent.rows, extent.chunk,
                                        StepWork<F, kRounds>{f, {}, job.seed}, rule, job.unscale, job.found_inf, own);
                                C10_CUDA_KERNEL_LAUNCH_CHECK();
                              };
                              rounds ? run(std::true_type()) : run(std::false_type());
                            });
    // Count last, when nothing can fail any more: steps are counted if and only if they are made.
    for (const StepRow& row : job.rows) {
      if (job.host_steps) *row.step += 1;
    }
    return true;
  }

  static void split(const StepJob& job) { convert(job, StoreWork<false>{0}); }
  static void join(const StepJob& job) { convert(job, JoinWork()); }
  static void stochastic_round(const StepJob& job) { convert(job, StoreWork<true>{job.seed}); }
  static void encode(const StepJob&) {}  // checks refuse codes
  static void decode(const StepJob&) {}

 private:
  template <class Work>
  static void convert(const StepJob& job, const Work& work) {
    const c10::cuda::CUDAGuard guard(job.device);
    const c10::NoGradGuard no_grad;
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(job.device.index());
    launch_rows<kManyBytes>(blocks_of(job.rows), job.device, stream,
                            [&](const auto& arguments, const StepBlocks* buffer, const Extent& extent) {
                              constexpr int kBytes = std::decay_t<decltype(arguments)>::bytes;
                              run_conversion<Work, kBytes>
                                  <<<static_cast<unsigned>(extent.blocks), kThreads, 0, stream>>>(
                                      arguments, buffer, extent.rows, extent.chunk, work);
                              C10_CUDA_KERNEL_LAUNCH_CHECK();
                            });
  }
};

template struct Steps<CudaSteps>;

}  // namespace amp_patch

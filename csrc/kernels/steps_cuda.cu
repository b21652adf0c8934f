// The optimizers' steps on CUDA: the functions of step_ops.h over this loop. One launch counts the steps and computes
// each tensor's rates, and one does all the work; a capture of very many tensors takes more.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>

#include "coded_chunk.h"
#include "cuda_launch.h"
#include "step_chunk.h"
#include "step_ops.h"

namespace amp_patch {
namespace {

__device__ bool is_skipped(const float* found_inf) { return found_inf != nullptr && *found_inf != 0; }

// One thread per row.
template <class R, int kBytes>
__global__ void __launch_bounds__(kThreads)
    count_steps(const __grid_constant__ Arguments<R, kBytes> arguments, const R* buffer, int count, AdamRule rule,
                const float* found_inf, AdamRates* rates) {
  const R* rows = buffer != nullptr ? buffer : arguments.rows;
  const int slot = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  if (slot < count && rows[slot].begins && !is_skipped(found_inf)) {
    rates[rows[slot].index] = rule.count(rows[slot].step);
  }
}

// Sets the numbers in `work` that are read from the device's memory.
template <class Work, class Rule, class Rates>
__device__ void load_numbers(Work& work, const Rule& rule, const UnscaleRule& unscale, const Rates* rates, int index) {
  work.f.unscale = unscale.unscale();
  if constexpr (Rule::kCounts) {
    work.rates = rates[index];
  } else {
    work.rates = rule.rates();
  }
}

// Returns the largest `own` of the 32 threads of a warp. All of them must call it.
struct LargestOfWarp {
  __device__ uint32_t operator()(uint32_t own) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xFFFFFFFFu, own);
#else
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, own, lanes);
      own = own < other ? other : own;
    }
    return own;
#endif
  }
};

// Does the work of this thread in a launch.
template <class Work>
__device__ void run_work(const Work& work, const StepBlocks& row, int chunk) {
  run_step_chunk(work, row, chunk, blockIdx.x, static_cast<int>(threadIdx.x));
}
template <class Work>
__device__ void run_work(const Work& work, const CodedBlocks& row, int chunk) {
  run_coded_chunk(work, row, chunk, blockIdx.x, static_cast<int>(threadIdx.x), LargestOfWarp());
}

template <class F, class Rule, int kBytes, bool kRounds>
__global__ void __launch_bounds__(kThreads, StepBlocks::kResident)
    run_steps(const __grid_constant__ Arguments<StepBlocks, kBytes> arguments, const StepBlocks* buffer, int count,
              int chunk, StepWork<F, kRounds> work, Rule rule, UnscaleRule unscale, const float* found_inf,
              const typename F::Rates* rates) {
  if (is_skipped(found_inf)) return;
  const StepBlocks* rows = buffer != nullptr ? buffer : arguments.rows;
  const StepBlocks& row = rows[row_of(rows, count, blockIdx.x)];
  load_numbers(work, rule, unscale, rates, row.index);
  run_work(work, row, chunk);
}

template <class F, class Rule, int kBytes>
__global__ void __launch_bounds__(kThreads, CodedBlocks::kResident)
    run_coded_steps(const __grid_constant__ Arguments<CodedBlocks, kBytes> arguments, const CodedBlocks* buffer,
                    int count, int chunk, CodedStepWork<F> work, Rule rule, UnscaleRule unscale, const float* found_inf,
                    const typename F::Rates* rates) {
  if (is_skipped(found_inf)) return;
  const CodedBlocks* rows = buffer != nullptr ? buffer : arguments.rows;
  const CodedBlocks& row = rows[row_of(rows, count, blockIdx.x)];
  load_numbers(work, rule, unscale, rates, row.index);
  run_work(work, row, chunk);
}

template <class Work, class R, int kBytes>
__global__ void __launch_bounds__(kThreads, R::kResident)
    run_conversion(const __grid_constant__ Arguments<R, kBytes> arguments, const R* buffer, int count, int chunk,
                   Work work) {
  const R* rows = buffer != nullptr ? buffer : arguments.rows;
  run_work(work, rows[row_of(rows, count, blockIdx.x)], chunk);
}

// A copy on the device of step counts that are on the CPU, because kernels cannot read memory of the CPU.
template <class R>
at::Tensor copy_steps(const StepJob& job, std::vector<R>& blocks) {
  const auto count = static_cast<int64_t>(job.rows.size());
  const auto options = at::TensorOptions().dtype(at::kFloat);
  const at::Tensor host = at::empty({count}, options.device(at::kCPU).pinned_memory(true));
  const at::Tensor copy = at::empty({count}, options.device(job.device));
  float* const values = host.mutable_data_ptr<float>();
  for (int64_t i = 0; i < count; ++i) values[i] = *job.rows[i].step;
  copy.copy_(host, /*non_blocking=*/true);
  for (R& row : blocks) row.step = copy.mutable_data_ptr<float>() + row.index;
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
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(job.device.index());
    if constexpr (F::kStates > 0) {
      if (!job.scales.empty()) {
        launch_steps<Rule>(job, coded_blocks_of(job.rows, job.scales), rule,
                           [&](const auto& arguments, const CodedBlocks* buffer, const Extent& extent,
                               const typename F::Rates* rates) {
                             constexpr int kBytes = std::decay_t<decltype(arguments)>::bytes;
                             run_coded_steps<F, Rule, kBytes>
                                 <<<static_cast<unsigned>(extent.blocks), kThreads, 0, stream>>>(
                                     arguments, buffer, extent.rows, extent.chunk, CodedStepWork<F>{{f, {}, job.seed}},
                                     rule, job.unscale, job.found_inf, rates);
                           });
        return true;
      }
    }
    const bool rounds = std::any_of(job.rows.begin(), job.rows.end(),
                                    [](const StepRow& row) { return row.dtype[kParam] == at::kBFloat16; });
    launch_steps<Rule>(
        job, blocks_of(job.rows), rule,
        [&](const auto& arguments, const StepBlocks* buffer, const Extent& extent, const typename F::Rates* rates) {
          constexpr int kBytes = std::decay_t<decltype(arguments)>::bytes;
          const auto run = [&](auto rounds) {
            constexpr bool kRounds = decltype(rounds)::value;
            run_steps<F, Rule, kBytes, kRounds><<<static_cast<unsigned>(extent.blocks), kThreads, 0, stream>>>(
                arguments, buffer, extent.rows, extent.chunk, StepWork<F, kRounds>{f, {}, job.seed}, rule, job.unscale,
                job.found_inf, rates);
          };
          rounds ? run(std::true_type()) : run(std::false_type());
        });
    return true;
  }

  static void split(const StepJob& job) { convert(job, blocks_of(job.rows), StoreWork<false>{0}); }
  static void join(const StepJob& job) { convert(job, blocks_of(job.rows), JoinWork()); }
  static void stochastic_round(const StepJob& job) { convert(job, blocks_of(job.rows), StoreWork<true>{job.seed}); }
  static void encode(const StepJob& job) { convert(job, coded_blocks_of(job.rows, job.scales), EncodeWork()); }
  static void decode(const StepJob& job) { convert(job, coded_blocks_of(job.rows, job.scales), DecodeWork()); }

 private:
  // Counts the steps of all rows, and calls launch(arguments, buffer, extent, rates) for each launch of `rows`.
  template <class Rule, class R, class Launch>
  static void launch_steps(const StepJob& job, std::vector<R> rows, const Rule& rule, const Launch& launch) {
    const c10::cuda::CUDAGuard guard(job.device);
    const c10::NoGradGuard no_grad;
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(job.device.index());
    require(!job.host_steps || !is_capturing(stream), "steps on the host in a capture");
    const bool all = rows.size() == job.rows.size();
    at::Tensor steps, rates;
    if (job.host_steps) steps = copy_steps(job, rows);
    if constexpr (Rule::kCounts) {
      const auto bytes = static_cast<int64_t>(job.rows.size() * sizeof(AdamRates));
      rates = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(job.device));
    }
    auto* const own = rates.defined() ? static_cast<typename Rule::Rates*>(rates.mutable_data_ptr()) : nullptr;
    const auto count = [&](const auto& arguments, const auto* buffer, const Extent& extent) {
      if constexpr (Rule::kCounts) {
        constexpr int kBytes = std::decay_t<decltype(arguments)>::bytes;
        using Given = std::remove_const_t<std::remove_pointer_t<decltype(buffer)>>;
        count_steps<Given, kBytes><<<(extent.rows + kThreads - 1) / kThreads, kThreads, 0, stream>>>(
            arguments, buffer, extent.rows, rule, job.found_inf, own);
        C10_CUDA_KERNEL_LAUNCH_CHECK();
      }
    };
    // Rows without elements first: if memory is short, their launch fails before a weight is written.
    if (Rule::kCounts && !job.host_steps && !all) {
      launch_rows<kManyBytes>(blocks_of(job.rows, true), job.device, stream, count);
    }
    launch_rows<kManyBytes>(std::move(rows), job.device, stream,
                            [&](const auto& arguments, const R* buffer, const Extent& extent) {
                              count(arguments, buffer, extent);
                              launch(arguments, buffer, extent, own);
                              C10_CUDA_KERNEL_LAUNCH_CHECK();
                            });
    // Count last, when nothing can fail any more: steps are counted if and only if they are made.
    for (const StepRow& row : job.rows) {
      if (job.host_steps) *row.step += 1;
    }
  }

  template <class R, class Work>
  static void convert(const StepJob& job, std::vector<R> rows, const Work& work) {
    const c10::cuda::CUDAGuard guard(job.device);
    const c10::NoGradGuard no_grad;
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(job.device.index());
    launch_rows<kManyBytes>(
        std::move(rows), job.device, stream, [&](const auto& arguments, const R* buffer, const Extent& extent) {
          constexpr int kBytes = std::decay_t<decltype(arguments)>::bytes;
          run_conversion<Work, R, kBytes><<<static_cast<unsigned>(extent.blocks), kThreads, 0, stream>>>(
              arguments, buffer, extent.rows, extent.chunk, work);
          C10_CUDA_KERNEL_LAUNCH_CHECK();
        });
  }
};

template struct Steps<CudaSteps>;

}  // namespace amp_patch

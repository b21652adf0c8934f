// The optimizers' steps on the CPU: the functions of step_ops.h over this loop. One pass over the chunks of all tensors
// reads, computes and writes everything about an element; a chunk is one call of Set::step (step_vectors.h).
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define AMP_PATCH_X86 1
#include <immintrin.h>
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // wrong, in GCC 12's own headers: gcc.gnu.org/PR105593
#endif

#include <cstring>

#include "cpu_chunks.h"
#include "random.h"
#include "step_ops.h"

namespace amp_patch {
namespace {

constexpr int64_t kStepGrain = 16384;  // least elements worth a thread
constexpr int64_t kVector = 8;         // torch's vectors: all chunks but a tensor's last have whole ones
static_assert(kChunk % kVector == 0);

namespace portable {
#define AMP_PATCH_WIDTH 1
#include "step_vectors.h"
#undef AMP_PATCH_WIDTH
}  // namespace portable

#ifdef AMP_PATCH_X86
#pragma GCC push_options
#pragma GCC target("avx2,f16c,fma")
namespace avx2 {
#define AMP_PATCH_WIDTH 8
#include "step_vectors.h"
#undef AMP_PATCH_WIDTH
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,f16c,fma,avx512f,avx512bw,avx512dq,avx512vl")
namespace avx512 {
#define AMP_PATCH_WIDTH 16
#include "step_vectors.h"
#undef AMP_PATCH_WIDTH
}  // namespace avx512
#pragma GCC pop_options
#endif

template <class Visit>
void on_set(const Visit& visit) {
#ifdef AMP_PATCH_X86
  switch (instruction_set()) {
    case 2:
      return visit(avx512::Loops());
    case 1:
      return visit(avx2::Loops());
  }
#endif
  visit(portable::Loops());
}

// Calls visit(E()) with the element type of `dtype`.
template <class Visit>
void with_dtype(at::ScalarType dtype, const Visit& visit) {
  switch (dtype) {
    case at::kHalf:
      return visit(c10::Half());
    case at::kBFloat16:
      return visit(c10::BFloat16());
    default:
      return visit(float());
  }
}

template <class E>
E* at(const StepRow& row, StepPlace place, int64_t begin) {
  return static_cast<E*>(row.data[place]) + begin;
}

// Calls visit(masters) with the form of the masters, from element `begin` on. `random` has 16 bits per element, for
// weights that are rounded stochastically.
template <class Loops, class Visit>
void with_masters(const StepRow& row, int64_t begin, const uint16_t* random, const Visit& visit) {
  if (row.dtype[kParam] == at::kShort) {
    return visit(typename Loops::Split{at<int16_t>(row, kParam, begin), at<c10::BFloat16>(row, kWeight, begin)});
  }
  if (row.dtype[kParam] == at::kBFloat16) {
    return visit(typename Loops::Rounded{at<c10::BFloat16>(row, kParam, begin), random});
  }
  float* const params = at<float>(row, kParam, begin);
  if (row.data[kWeight] == nullptr) {
    visit(typename Loops::Whole{params});
  } else if (row.dtype[kWeight] == at::kHalf) {
    visit(typename Loops::template Published<c10::Half>{params, at<c10::Half>(row, kWeight, begin)});
  } else {
    visit(typename Loops::template Published<c10::BFloat16>{params, at<c10::BFloat16>(row, kWeight, begin)});
  }
}

// Calls visit(begin, end, random) for a whole chunk. If its elements are rounded stochastically, calls it for parts of
// the chunk, so small that their random bits stay in the innermost cache.
template <class Loops, class Visit>
void with_random(const StepRow& row, uint64_t seed, int64_t begin, int64_t end, const Visit& visit) {
  if (row.dtype[kParam] != at::kBFloat16) return visit(begin, end, static_cast<const uint16_t*>(nullptr));
  constexpr int64_t kPart = 2048;
  static_assert(kChunk % kPart == 0 && kPart % (kDrawn * Loops::kGroups) == 0);
  alignas(64) uint16_t random[kPart];
  for (; begin < end; begin += kPart) {
    const int64_t last = std::min(begin + kPart, end);
    Loops::fill_random(seed, row.draw, begin / kDrawn, (last - begin + kDrawn - 1) / kDrawn, random);
    visit(begin, last, static_cast<const uint16_t*>(random));
  }
}

// Calls visit(loops) with the loops of code_vectors.h for the codes at `place`.
template <class Visit>
void with_codes(const StepRow& row, StepPlace place, const Visit& visit) {
  on_set([&](auto loops) {
    using Codes = typename decltype(loops)::Codes;
    if (row.dtype[place] == at::kFloat8_e4m3fn) return visit(typename Codes::Kept());
    row.dtype[place] == at::kChar ? visit(typename Codes::Signed()) : visit(typename Codes::Unsigned());
  });
}

// Steps elements [begin, end) of one row, with `states` in FP32.
template <class F>
void step_elements(const F& f, const typename F::Rates& rates, const StepRow& row, int64_t begin, int64_t end,
                   const uint16_t* random, float* const* states) {
  on_set([&](auto loops) {
    with_dtype(row.dtype[kGrad], [&](auto element) {
      const auto* const grad = at<decltype(element)>(row, kGrad, begin);
      const auto run = [&](auto masters) { decltype(loops)::Set::step(f, rates, end - begin, grad, masters, states); };
      with_masters<decltype(loops)>(row, begin, random, run);
    });
  });
}

// Steps elements [begin, end) of one row, whose states are FP32.
template <class F>
void step_chunk(const F& f, const typename F::Rates& rates, const StepRow& row, int64_t begin, int64_t end,
                const uint16_t* random) {
  float* states[F::kStates + 1] = {};
  for (int s = 0; s < F::kStates; ++s) states[s] = at<float>(row, StepPlace(kState + s), begin);
  step_elements(f, rates, row, begin, end, random, states);
}

// Steps elements [begin, end) of one row, of which some states are codes. These are decoded block by block, so that the
// FP32 values stay in the innermost cache.
template <class F>
void step_coded_chunk(const F& f, const typename F::Rates& rates, const StepRow& row, const StepScales& scales,
                      int64_t begin, int64_t end, const uint16_t* random) {
  static_assert(kChunk % kBlock == 0);
  alignas(64) float decoded[F::kStates + 1][kBlock];
  for (int64_t from = begin; from < end; from += kBlock) {
    const int64_t to = std::min(from + kBlock, end), block = from / kBlock;
    constexpr int64_t kAhead = 4 * kBlock;
    if (from + kAhead < row.size) {
      for (int k = 0; k < kState + F::kStates; ++k) {
        if (row.data[k] == nullptr) continue;
        const int64_t item = item_size(row.dtype[k]);
        const char* const there = static_cast<const char*>(row.data[k]) + (from + kAhead) * item;
        for (int64_t byte = 0; byte < kBlock * item; byte += 64) __builtin_prefetch(there + byte);
      }
    }
    float* states[F::kStates + 1] = {};
    for (int s = 0; s < F::kStates; ++s) {
      const StepPlace place = StepPlace(kState + s);
      states[s] = scales[s] == nullptr ? at<float>(row, place, from) : decoded[s];
      if (scales[s] == nullptr) continue;
      with_codes(row, place, [&](auto loops) {
        decltype(loops)::decode(at<uint8_t>(row, place, from), scales[s][block], to - from, decoded[s]);
      });
    }
    step_elements(f, rates, row, from, to, random == nullptr ? nullptr : random + (from - begin), states);
    for (int s = 0; s < F::kStates; ++s) {
      if (scales[s] == nullptr) continue;
      const StepPlace place = StepPlace(kState + s);
      with_codes(row, place, [&](auto loops) {
        scales[s][block] = decltype(loops)::encode(decoded[s], to - from, at<uint8_t>(row, place, from));
      });
    }
  }
}

// Counts the step of every row, and returns its rates. Powers are computed once for rows with the same count.
std::vector<AdamRates> rates_of(const AdamRule& rule, const StepJob& job) {
  std::vector<AdamRates> rates(job.rows.size());
  float last = -1;
  AdamRates same{};
  for (size_t i = 0; i < job.rows.size(); ++i) {
    const float steps = job.rows[i].step != nullptr ? *job.rows[i].step : static_cast<float>(rule.steps.value);
    if (!(steps == last)) same = rule.numbers.rates(rule.lr.value, steps + 1);
    last = steps;
    rates[i] = same;
    if (job.rows[i].step != nullptr) *job.rows[i].step = steps + 1;
  }
  return rates;
}

std::vector<SgdRates> rates_of(const SgdRule& rule, const StepJob& job) {
  return std::vector<SgdRates>(job.rows.size(), rule.rates());
}

}  // namespace

struct CpuSteps {
  static constexpr c10::DeviceType device = c10::DeviceType::CPU;
  static constexpr bool reads_late = false;

  // Tells whether anything was written.
  template <class F, class Rule>
  static bool step(const StepJob& job, F f, const Rule& rule) {
    if (job.found_inf != nullptr && *job.found_inf != 0) return false;
    f.unscale = job.unscale.unscale();
    const std::vector<typename F::Rates> rates = rates_of(rule, job);
    for_each_chunk(job, [&](int64_t slot, int64_t begin, int64_t end) {
      const StepRow& row = job.rows[slot];
      on_set([&](auto loops) {
        with_random<decltype(loops)>(row, job.seed, begin, end, [&](int64_t from, int64_t to, const uint16_t* random) {
          if (job.scales.empty()) {
            step_chunk(f, rates[slot], row, from, to, random);
          } else {
            step_coded_chunk(f, rates[slot], row, job.scales[slot], from, to, random);
          }
        });
      });
    });
    return true;
  }

  static void split(const StepJob& job) {
    convert(job, [](auto loops, int64_t n, auto whole, auto split) { decltype(loops)::Set::convert(n, whole, split); });
  }
  static void join(const StepJob& job) {
    convert(job, [](auto loops, int64_t n, auto whole, auto split) { decltype(loops)::Set::convert(n, split, whole); });
  }
  static void stochastic_round(const StepJob& job) {
    for_each_chunk(job, [&](int64_t slot, int64_t begin, int64_t end) {
      const StepRow& row = job.rows[slot];
      on_set([&](auto loops) {
        using Loops = decltype(loops);
        with_random<Loops>(row, job.seed, begin, end, [&](int64_t from, int64_t to, const uint16_t* random) {
          Loops::Set::convert(to - from, typename Loops::Whole{at<float>(row, kGrad, from)},
                              typename Loops::Rounded{at<c10::BFloat16>(row, kParam, from), random});
        });
      });
    });
  }
  static void encode(const StepJob& job) {
    for_each_block(job, [](auto loops, auto* values, uint8_t* codes, float& scale, int64_t n) {
      scale = decltype(loops)::encode(values, n, codes);
    });
  }
  static void decode(const StepJob& job) {
    for_each_block(job, [](auto loops, auto* values, uint8_t* codes, float& scale, int64_t n) {
      decltype(loops)::decode(codes, scale, n, values);
    });
  }

 private:
  // Calls visit(loops, values, codes, scale, n) for each block of each tensor.
  template <class Visit>
  static void for_each_block(const StepJob& job, const Visit& visit) {
    for_each_chunk(job, [&](int64_t slot, int64_t begin, int64_t end) {
      const StepRow& row = job.rows[slot];
      with_codes(row, kState, [&](auto loops) {
        with_dtype(row.dtype[kGrad], [&](auto element) {
          for (int64_t from = begin; from < end; from += kBlock) {
            visit(loops, at<decltype(element)>(row, kGrad, from), at<uint8_t>(row, kState, from),
                  job.scales[slot][0][from / kBlock], std::min(kBlock, end - from));
          }
        });
      });
    });
  }

  // Calls visit(slot, begin, end) for all chunks of all tensors.
  template <class Visit>
  static void for_each_chunk(const StepJob& job, const Visit& visit) {
    std::vector<int64_t> sizes;
    sizes.reserve(job.rows.size());
    for (const StepRow& row : job.rows) sizes.push_back(row.size);
    CpuChunks(sizes).for_each(
        kStepGrain,
        [&](int64_t slot) {
          const StepRow& row = job.rows[slot];
          for (int k = 0; k < kPlaces; ++k) {
            if (row.data[k] != nullptr) prefetch_short(row.data[k], row.size * item_size(row.dtype[k]));
          }
        },
        [&](int64_t, int64_t slot, int64_t begin, int64_t end) { visit(slot, begin, end); });
  }

  template <class Convert>
  static void convert(const StepJob& job, const Convert& convert) {
    for_each_chunk(job, [&](int64_t slot, int64_t begin, int64_t end) {
      const StepRow& row = job.rows[slot];
      on_set([&](auto loops) {
        using Loops = decltype(loops);
        convert(loops, end - begin, typename Loops::Whole{at<float>(row, kGrad, begin)},
                typename Loops::Split{at<int16_t>(row, kParam, begin), at<c10::BFloat16>(row, kWeight, begin)});
      });
    });
  }
};

template struct Steps<CpuSteps>;

}  // namespace amp_patch

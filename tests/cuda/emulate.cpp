// csrc/kernels/chunk.h and step_chunk.h, the code of each CUDA thread, run on the host: every block, every thread, one
// after the other. tests/multi_tensor/test_chunk.py and test_step_chunk.py compile this file by itself and call
// emulate() and emulate_step() through ctypes.
#include <array>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "../../csrc/kernels/chunk.h"
#include "../../csrc/kernels/coded_chunk.h"
#include "../../csrc/kernels/step_chunk.h"

using namespace amp_patch;

extern "C" {

struct Given {  // a tensor, as Python hands it over
  void* data;
  int64_t dtype;
  int64_t dims;
  const int64_t* sizes;
  const int64_t* strides;
};

struct Options {
  int64_t max_rows, max_blocks;  // of a launch
  int64_t backwards;             // threads and blocks from the last to the first: nobody may notice
  int64_t last_blocks;           // only so many of each launch, its last ones
};

struct Seen {
  int64_t linear, strided, scattered, launches, blocks, widest, runs;
};
}

namespace {

View view(const Given& t) { return {t.data, static_cast<c10::ScalarType>(t.dtype), t.dims, t.sizes, t.strides}; }

template <size_t K>
bool is_contiguous(const std::array<View, K>& views) {
  for (const View& v : views) {
    int64_t stride = 1;
    for (int64_t d = v.dims - 1; d >= 0; stride *= v.sizes[d--]) {
      if (v.sizes[d] != 1 && v.strides[d] != stride) return false;
    }
  }
  return true;
}

// As cuda.cu has it of such tensors.
template <size_t K>
Row<static_cast<int>(K)> contiguous(const std::array<View, K>& views, int64_t index, int64_t size) {
  std::array<void*, K> data;
  std::array<c10::ScalarType, K> dtype;
  for (size_t k = 0; k < K; ++k) {
    data[k] = views[k].data;
    dtype[k] = views[k].dtype;
  }
  return contiguous_row<static_cast<int>(K)>(data, dtype, size, index);
}

// cuda.cu's run_chunks and add_partials over one launch.
template <class T, int N, class F, class R>
void launch(const F& f, const std::vector<R>& rows, int64_t chunk, int64_t blocks, const Options& options,
            float* found_inf, double* squares) {
  const auto count = static_cast<int>(rows.size());
  std::vector<double> partials(blocks);
  const int64_t begin = std::max<int64_t>(0, blocks - options.last_blocks);
  for (int64_t b = begin; b < blocks; ++b) {
    const int64_t block = options.backwards ? blocks - 1 - (b - begin) : b;
    std::array<double, kThreads> sums;
    for (int t = 0; t < kThreads; ++t) {
      const int thread = options.backwards ? kThreads - 1 - t : t;
      const Outcome outcome =
          run_chunk<T, N>(f, rows.data(), count, static_cast<int>(chunk), static_cast<uint32_t>(block), thread);
      if (outcome.bad && found_inf != nullptr) *found_inf = 1.0f;
      sums[thread] = outcome.sum;
    }
    for (int half = kThreads / 2; half > 0; half /= 2) {
      for (int t = 0; t < half; ++t) sums[t] += sums[t + half];
    }
    partials[block] = sums[0];
  }
  for (int slot = 0; slot < count && F::reduces; ++slot) {
    const int64_t end = slot + 1 < count ? rows[slot + 1].first : blocks;
    for (int64_t i = rows[slot].first; i < end; ++i) squares[rows[slot].index] += partials[i];
  }
}

// cuda_launch.h's launch_rows, with a grid that is refused as a GPU refuses it: visit(rows, chunk, blocks) for each
// launch.
template <class R, class Visit>
void launch_rows(std::vector<R> rows, const Options& options, Seen& seen, const Visit& visit) {
  const int64_t chunk = chunk_size(rows);
  for_each_launch(std::move(rows), chunk, options.max_rows, options.max_blocks, [&](int64_t count, const auto& write) {
    std::vector<R> part(count);
    const int64_t blocks = write(part.data());
    if (blocks < 1 || blocks > INT32_MAX) throw std::invalid_argument("a grid that no GPU takes");
    visit(part, chunk, blocks);
    ++seen.launches;
    seen.blocks += blocks;
  });
}

// The status of a call: what `call` returns, or that a launch was refused.
template <class Call>
int status_of(const Call& call) {
  try {
    return call();
  } catch (const std::invalid_argument&) {
    return 2;
  }
}

template <class T, int N, class F, class R>
void launch_all(const F& f, const std::vector<R>& rows, const Options& options, float* found_inf, double* squares,
                Seen& seen) {
  launch_rows(rows, options, seen, [&](const std::vector<R>& part, int64_t chunk, int64_t blocks) {
    launch<T, N>(f, part, chunk, blocks, options, found_inf, squares);
  });
}

template <class T, int N, class F>
void run(const F& f, int64_t count, const std::array<const Given*, 3>& lists, const Options& options, float* found_inf,
         double* squares, Seen& seen) {
  constexpr int K = N + (F::writes ? 1 : 0);
  std::vector<Row<K>> linear;
  std::vector<StridedRow<K>> strided;
  for (int64_t i = 0; i < count; ++i) {
    const bool is_double = static_cast<c10::ScalarType>(lists[0][i].dtype) == c10::ScalarType::Double;
    if (is_double != std::is_same_v<T, double>) continue;
    std::array<View, K> views;
    for (int n = 0; n < N; ++n) views[n] = view(lists[n][i]);
    if constexpr (F::writes) views[K - 1] = view(lists[2][i]);
    StridedRow<K> row;
    const Layout layout = place<K>(views, i, row);
    if (row.size == 0) continue;  // ops.h names no empty tensor to a loop
    if (layout == Layout::kScattered) {
      ++seen.scattered;
      continue;
    }
    if (layout == Layout::kLinear) {
      linear.push_back(is_contiguous(views) ? contiguous(views, i, row.size) : row);
      seen.widest = std::max<int64_t>(seen.widest, row.width);
    } else {
      strided.push_back(row);
    }
  }
  seen.linear += static_cast<int64_t>(linear.size());
  seen.strided += static_cast<int64_t>(strided.size());
  launch_all<T, N>(f, linear, options, found_inf, squares, seen);
  launch_all<T, N>(f, strided, options, found_inf, squares, seen);
}

}  // namespace

extern "C" int emulate(const char* op, int64_t count, const Given* x, const Given* y, const Given* out, double a,
                       double b, int64_t watch, float* found_inf, double* squares, const Options* options, Seen* seen) {
  const std::array<const Given*, 3> lists = {x, y, out};
  const auto with = [&](auto zero) {
    using T = decltype(zero);
    const Scalar<T> first{static_cast<T>(a), nullptr, nullptr}, second{static_cast<T>(b), nullptr, nullptr};
    const auto one = [&](const auto& f) { run<T, 1>(f, count, lists, *options, found_inf, squares, *seen); };
    const auto two = [&](const auto& f) { run<T, 2>(f, count, lists, *options, found_inf, squares, *seen); };
    if (!std::strcmp(op, "copy")) return one(Copy<T>{}), 0;
    if (!std::strcmp(op, "scale")) return one(Scale<T>{first, T(0)}), 0;
    if (!std::strcmp(op, "check_finite")) return one(CheckFinite<T>{first}), 0;
    if (!std::strcmp(op, "l2norm")) return one(Norm<T>{first}), 0;
    if (!std::strcmp(op, "unscale_l2norm")) return one(ScaleNorm<T>{{first, T(0)}}), 0;
    if (!std::strcmp(op, "axpby")) return two(Axpby<T>{first, second, (watch & 1) != 0, (watch & 2) != 0, T(0)}), 0;
    if (!std::strcmp(op, "adopt")) return two(Adopt<T>{c10::ScalarType::Float}), 0;
    return 1;
  };
  return status_of([&] { return with(float()) + with(double()); });
}

namespace {

template <class R>
int64_t blocks_of_sizes(int64_t count, const int64_t* sizes) {
  std::vector<R> rows(count);
  for (int64_t i = 0; i < count; ++i) rows[i].size = sizes[i];
  return number_blocks(rows, chunk_size(rows));
}

}  // namespace

// The blocks of tensors of these sizes; `coded`: of a step whose states are codes.
extern "C" int64_t count_blocks(int64_t count, const int64_t* sizes, int64_t coded) {
  return coded ? blocks_of_sizes<CodedBlocks>(count, sizes) : blocks_of_sizes<StepBlocks>(count, sizes);
}

namespace {

// Counts the packs and single elements of `work`.
template <class Work>
struct Counted {
  const Work& work;
  int64_t& runs;

  template <int V, class R>
  void run(const R& row, int64_t at) const {
    ++runs;
    work.template run<V>(row, at);
  }
};

struct Places {  // where an optimizer's lists are, as Python hands them over; null: there is none
  const Given* lists[kPlaces];
  float** steps;
};

// steps_cuda.cu's launches. `begin(row)` is asked for a row's work, once for every block.
template <class Begin>
void run_places(const std::vector<StepBlocks>& rows, const Options& options, Seen& seen, const Begin& begin) {
  launch_rows(rows, options, seen, [&](const std::vector<StepBlocks>& part, int64_t chunk, int64_t blocks) {
    const auto work_of = begin(part);
    for (int64_t b = 0; b < blocks; ++b) {
      const auto block = static_cast<uint32_t>(options.backwards ? blocks - 1 - b : b);
      const StepBlocks& row = part[row_of(part.data(), static_cast<int>(part.size()), block)];
      const auto work = work_of(row);
      for (int t = 0; t < kThreads; ++t) {
        const int thread = options.backwards ? kThreads - 1 - t : t;
        run_step_chunk(Counted<decltype(work)>{work, seen.runs}, row, static_cast<int>(chunk), block, thread);
      }
    }
  });
}

// Of what is rounded stochastically: tensor i has draw kFirstDraw + i.
constexpr uint64_t kSeed = 7, kFirstDraw = uint64_t{3} << 40;

template <class F>
StepWork<F, true> with_numbers(const double* numbers, bool flag) {
  StepWork<F, true> work{};
  work.seed = kSeed;
  F& f = work.f;
  f.unscale = UnscaleRule{{{static_cast<float>(numbers[0]), nullptr, nullptr}, {1, nullptr, nullptr}}, flag}.unscale();
  f.weight_decay = static_cast<float>(numbers[1]);
  return work;
}

}  // namespace

// numbers: factor, weight decay, lr, then beta1, beta2, eps of adam or momentum of sgd. flag: maximize.
extern "C" int emulate_step(const char* op, int64_t count, const Places* places, const double* numbers, int64_t flag,
                            const Options* options, Seen* seen) {
  std::vector<StepRow> given(count);
  for (int64_t i = 0; i < count; ++i) {
    StepRow& row = given[i];
    for (int k = 0; k < kPlaces; ++k) {
      if (places->lists[k] == nullptr) continue;
      const Given& t = places->lists[k][i];
      row.data[k] = t.data;
      row.dtype[k] = static_cast<c10::ScalarType>(t.dtype);
      row.size = 1;
      for (int64_t d = 0; d < t.dims; ++d) row.size *= t.sizes[d];
    }
    row.step = places->steps != nullptr ? places->steps[i] : nullptr;
    row.draw = kFirstDraw + static_cast<uint64_t>(i);
  }
  const std::vector<StepBlocks> rows = blocks_of(given);
  for (const StepBlocks& row : rows) seen->widest = std::max<int64_t>(seen->widest, row.width);
  const Scalar<double> lr{numbers[2], nullptr, nullptr};
  const auto adam = [&](auto functor) {
    auto work = with_numbers<decltype(functor)>(numbers, flag != 0);
    work.f.weight1 = static_cast<float>(1 - numbers[3]);
    work.f.beta2 = static_cast<float>(numbers[4]);
    work.f.weight2 = static_cast<float>(1 - numbers[4]);
    work.f.eps = static_cast<float>(numbers[5]);
    const AdamRule rule{{numbers[3], numbers[4], 0, false, true}, lr, {}};
    std::vector<AdamRates> rates(count);
    const auto count_steps = [&](const std::vector<StepBlocks>& part) {
      for (const StepBlocks& row : part) {
        if (row.begins) rates[row.index] = rule.count(row.step);
      }
    };
    launch_rows(blocks_of(given, true), *options, *seen,
                [&](const std::vector<StepBlocks>& part, int64_t, int64_t) { count_steps(part); });
    run_places(rows, *options, *seen, [&](const std::vector<StepBlocks>& part) {
      count_steps(part);
      return [&](const StepBlocks& row) {
        work.rates = rates[row.index];
        return work;
      };
    });
  };
  const auto plainly = [&](auto work) {
    run_places(rows, *options, *seen,
               [&](const std::vector<StepBlocks>&) { return [&](const StepBlocks&) { return work; }; });
  };
  return status_of([&] {
    if (!std::strcmp(op, "adam")) return adam(Adam<false>()), 0;
    if (!std::strcmp(op, "amsgrad")) return adam(Adam<true>()), 0;
    if (!std::strcmp(op, "sgd")) {
      auto work = with_numbers<Sgd<true>>(numbers, flag != 0);
      work.f.momentum = static_cast<float>(numbers[3]);
      work.f.weight = 1;
      work.f.nesterov = work.f.first_run = false;
      work.rates = SgdRule{lr}.rates();
      return plainly(work), 0;
    }
    if (!std::strcmp(op, "split")) return plainly(StoreWork<false>{0}), 0;
    if (!std::strcmp(op, "stochastic_round")) return plainly(StoreWork<true>{kSeed}), 0;
    if (!std::strcmp(op, "join")) return plainly(JoinWork()), 0;
    return 1;
  });
}

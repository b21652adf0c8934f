// The optimizers' steps, each written once: its checks, its numbers, its functor. It is like ops.h, but for kernels
// that take more tensors of a parameter. A device's loop (`CpuSteps` in steps_cpu.cpp, `CudaSteps` in steps_cuda.cu)
// has
//   device                          the c10::DeviceType it serves
//   reads_late                      whether it reads numbers in memory during its writes, not before them
//   step(StepJob, functor, rule)    applies the functor to all tensors; the rule computes a tensor's rates
//   split(StepJob), join(StepJob)   FP32 masters into split ones, and back
//   stochastic_round(StepJob)       FP32 masters into weights
//   encode(StepJob), decode         states or activations into codes and scales (codes.h), and back
#pragma once

#include <ATen/ATen.h>

#include "codes.h"
#include "ops.h"
#include "step_rows.h"

namespace amp_patch {

struct StepJob {
  c10::Device device;
  std::vector<StepRow> rows;  // also of empty tensors, whose steps are counted
  bool host_steps;            // the counts of steps are on the CPU, all other tensors on a GPU
  UnscaleRule unscale;
  const float* found_inf;          // if it is not 0, nothing changes; null: never skipped
  uint64_t seed;                   // the seed of stochastic rounding
  std::vector<StepScales> scales;  // of the states of each row; empty if no state is codes
  std::vector<Number> kept;        // owns the tensors that `unscale` points into
};

// The draws of stochastic rounding, for parameters without masters: one per parameter, different for each step of a
// tensor; empty if all parameters have masters.
using IntList = std::vector<int64_t>;

template <class Loop>
struct Steps {
  static void adam(const Tensors& grads, const Tensors& params, const Tensors& exp_avgs, const Tensors& exp_avg_sqs,
                   const Tensors& max_exp_avg_sqs, const Tensors& steps, const Tensors& low,
                   const Tensors& exp_avg_scales, const Tensors& exp_avg_sq_scales, const Number& lr,
                   const Number& step, const std::vector<Number>& factors, const MaybeTensor& found_inf, double beta1,
                   double beta2, double eps, double weight_decay, bool decoupled, bool maximize, bool bias_correction,
                   int64_t seed, const IntList& draws);
  static void stochastic_round(const Tensors& masters, const Tensors& weights, int64_t seed, const IntList& draws);
  static void split(const Tensors& masters, const Tensors& weights, const Tensors& halves);
  static void join(const Tensors& weights, const Tensors& halves, const Tensors& masters);
  static void encode(const Tensors& values, const Tensors& codes, const Tensors& scales);
  static void decode(const Tensors& codes, const Tensors& values, const Tensors& scales);
  static void sgd(const Tensors& grads, const Tensors& params, const Tensors& momentum_buffers, const Tensors& low,
                  const Tensors& momentum_scales, const Number& lr, const std::vector<Number>& factors,
                  const MaybeTensor& found_inf, double momentum, double dampening, double weight_decay, bool nesterov,
                  bool maximize, bool first_run, int64_t seed, const IntList& draws);
};

// ---------------------------------------------------------------------------------------------------------------------
// Checks

inline bool same_strides(const at::Tensor& a, const at::Tensor& b) {
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) != 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

// A list of the call: its place in a row's data, and its requirements.
struct StepList {
  const Tensors* tensors;
  StepPlace place;
  bool written;
  std::initializer_list<at::ScalarType> dtypes;
};

// The scales of a state in codes: the list of the states, and one tensor for each.
struct StateScales {
  const StepList* states;
  const Tensors* tensors;
};

// The storages of the tensors at one index, of its step, and of the scales of its states.
constexpr int kStepStorage = kPlaces, kScaleStorages = kPlaces + 1;
using Storages = std::array<const void*, kScaleStorages + kPlaces - kState>;

// Refuses a written tensor that shares elements with any other. If no storages are shared, nothing is compared.
inline void check_disjoint(const std::vector<StepList>& lists, const std::vector<StateScales>& scales,
                           const StepJob& job, const std::vector<Storages>& storages) {
  const std::vector<StepRow>& rows = job.rows;
  size_t capacity = 64;
  while (capacity < 2 * rows.size() * (lists.size() + scales.size() + 1)) capacity *= 2;
  std::vector<const void*> seen(capacity);
  const auto slot_of = [&](const void* storage) {
    size_t slot = (reinterpret_cast<uintptr_t>(storage) >> 4) * 0x9E3779B97F4A7C15u >> 20 & (capacity - 1);
    while (seen[slot] != nullptr && seen[slot] != storage) slot = (slot + 1) & (capacity - 1);
    return slot;
  };
  bool shared = false;
  for (size_t i = 0; i < rows.size() && !shared; ++i) {
    const auto insert = [&](const void* storage) {
      if (storage == nullptr) return;
      const size_t slot = slot_of(storage);
      shared = shared || seen[slot] != nullptr;
      seen[slot] = storage;
    };
    for (const StepList& list : lists) {
      if (list.written) insert(storages[i][list.place]);
    }
    insert(storages[i][kStepStorage]);
    for (const StateScales& each : scales) {
      if (each.states->written) insert(storages[i][kScaleStorages + each.states->place - kState]);
    }
  }
  for (const StepList& list : lists) {
    for (size_t i = 0; i < rows.size() && !shared && !list.written; ++i) {
      const void* const storage = storages[i][list.place];
      shared = storage != nullptr && seen[slot_of(storage)] != nullptr;
    }
  }
  if (!shared) return;
  struct Span {
    const char *begin, *end;
    bool written;
  };
  std::vector<Span> spans;
  const auto add = [&](const void* data, int64_t bytes, bool written) {
    const char* const begin = static_cast<const char*>(data);
    if (bytes != 0) spans.push_back({begin, begin + bytes, written});
  };
  for (const StepList& list : lists) {
    for (size_t i = 0; i < rows.size(); ++i) {
      add(rows[i].data[list.place], rows[i].size * item_size((*list.tensors)[i].scalar_type()), list.written);
    }
  }
  for (const StepRow& row : rows) add(row.step, row.step != nullptr ? sizeof(float) : 0, true);
  for (const StateScales& each : scales) {
    for (size_t i = 0; i < job.scales.size(); ++i) {
      const float* const data = job.scales[i][each.states->place - kState];
      add(data, data != nullptr ? blocks_in(rows[i].size) * sizeof(float) : 0, each.states->written);
    }
  }
  const auto before = [](const Span& a, const Span& b) { return a.begin < b.begin; };
  if (!std::is_sorted(spans.begin(), spans.end(), before)) std::sort(spans.begin(), spans.end(), before);
  const char *written = nullptr, *read = nullptr;  // the ends of the spans so far
  for (const Span& span : spans) {
    require(written <= span.begin && (!span.written || read <= span.begin), "overlap");
    const char*& reached = span.written ? written : read;
    reached = std::max(reached, span.end);
  }
}

// Checks the tensors at index i of the lists, and fills their row.
inline void check_place(const std::vector<StepList>& lists, size_t i, c10::Device device, bool recorded, StepRow& row,
                        Storages& storages, std::atomic<bool>& lazy) {
  const at::Tensor& param = (*lists[1].tensors)[i];
  bool contiguous = true;
  for (const StepList& list : lists) {
    list.tensors->prefetch(i + 8);
    const at::Tensor& t = (*list.tensors)[i];
    check_plain(t, device);
    const at::ScalarType dtype = t.scalar_type();
    require(std::find(list.dtypes.begin(), list.dtypes.end(), dtype) != list.dtypes.end(), "dtype");
    row.dtype[list.place] = dtype;
    Fact fact;
    learn(t, fact);
    require(t.sizes() == param.sizes(), "shape");
    row.data[list.place] = fact.data;
    row.size = fact.numel;
    storages[list.place] = fact.numel != 0 ? fact.storage : nullptr;
    contiguous = contiguous && fact.contiguous;
    if (!list.written) continue;
    require(!recorded || !t.requires_grad(), "requires grad");
    if (is_lazy(t)) lazy.store(true, std::memory_order_relaxed);
  }
  require(row.dtype[kParam] != at::kShort || row.dtype[kWeight] == at::kBFloat16, "split");
  require(row.dtype[kParam] != at::kBFloat16 || row.data[kWeight] == nullptr, "rounded twice");
  if (contiguous || row.size == 0) return;
  for (const StepList& list : lists) {
    const at::Tensor& t = (*list.tensors)[i];
    require(t.is_non_overlapping_and_dense() && same_strides(t, param), "strides");
  }
}

inline void check_step(const at::Tensor& t, c10::Device device, bool recorded, float*& data, const void*& storage) {
  check_plain(t, device);
  require(t.scalar_type() == at::kFloat && t.unsafeGetTensorImpl()->numel() == 1, "step");
  require(!recorded || !t.requires_grad(), "requires grad");
  Fact fact;
  learn(t, fact);
  require(!is_lazy(t), "lazy step");
  data = reinterpret_cast<float*>(fact.data);
  storage = fact.storage;
}

// Checks the scales of states, of which those in codes have a tensor each and the others an empty one. Stores them in
// the job.
inline void check_scales(const StateScales& given, StepJob& job, std::vector<Storages>& storages) {
  const Tensors &states = *given.states->tensors, &scales = *given.tensors;
  const int k = given.states->place - kState;
  require(scales.empty() || scales.size() == states.size(), "length");
  const bool recorded = c10::GradMode::is_enabled();
  for (size_t i = 0; i < states.size(); ++i) {
    const bool coded = is_coded(states[i].scalar_type());
    require(!coded || !scales.empty(), "codes");
    if (!coded) continue;
    const at::Tensor& t = scales[i];
    check_plain(t, job.device);
    require(t.scalar_type() == at::kFloat && t.is_contiguous(), "scales");
    require(t.numel() == blocks_in(states[i].numel()) && (!recorded || !t.requires_grad()), "scales");
    Fact fact;
    learn(t, fact);
    if (job.scales.empty()) job.scales.resize(job.rows.size());
    if (t.numel() == 0) continue;
    storages[i][kScaleStorages + k] = fact.storage;
    job.scales[i][k] = t.mutable_data_ptr<float>();
  }
}

// The number, or a copy of it if a written list holds it.
template <class Loop>
Number apart(const Number& number, const std::vector<StepList>& lists, const StepJob& job) {
  return apart<Loop>(number, [&](const at::Tensor& t) {
    const char* const data = static_cast<const char*>(t.const_data_ptr());
    for (const StepList& list : lists) {
      if (!list.written) continue;
      for (const StepRow& row : job.rows) {
        const char* const begin = static_cast<const char*>(row.data[list.place]);
        if (begin <= data && data < begin + row.size * c10::elementSize(row.dtype[list.place])) return true;
      }
    }
    return false;
  });
}

template <class Loop>
StepJob check_steps(const std::vector<StepList>& lists, const Tensors& steps, const std::vector<Number>& factors,
                    std::initializer_list<const Number*> numbers, const MaybeTensor& found_inf,
                    const std::vector<StateScales>& scales = {}, bool maximize = false, int64_t seed = 0,
                    const IntList& draws = {}) {
  const Tensors& params = *lists[1].tensors;
  StepJob job{
      c10::Device(Loop::device),   {}, false, {{{1, nullptr, nullptr}, {1, nullptr, nullptr}}, maximize}, nullptr,
      static_cast<uint64_t>(seed), {}, {}};
  if (!params.empty() && params[0].defined()) job.device = params[0].device();
  if (params.empty() && found_inf.has_value() && found_inf->defined()) job.device = found_inf->device();
  require(job.device.type() == Loop::device, "device");
  for (const StepList& list : lists) require(list.tensors->size() == params.size(), "length");
  require(steps.empty() || steps.size() == params.size(), "length");
  require(draws.empty() || draws.size() == params.size(), "length");
  c10::Device counted_on = job.device;
  if (!steps.empty() && steps[0].defined() && steps[0].device().type() == c10::DeviceType::CPU) {
    counted_on = steps[0].device();
  }
  job.host_steps = counted_on != job.device;
  require(!job.host_steps || !found_inf.has_value(), "steps on the host, found_inf on the device");

  const bool recorded = c10::GradMode::is_enabled();
  std::atomic<bool> lazy{false};
  job.rows.resize(params.size());
  std::vector<Storages> storages(params.size());
  for_each_index(params.size(), [&](size_t i) {
    check_place(lists, i, job.device, recorded, job.rows[i], storages[i], lazy);
    require(job.rows[i].dtype[kParam] != at::kBFloat16 || !draws.empty(), "draws");
    if (!draws.empty()) job.rows[i].draw = static_cast<uint64_t>(draws[i]);
    if (!steps.empty()) {
      steps.prefetch(i + 8);
      check_step(steps[i], counted_on, recorded, job.rows[i].step, storages[i][kStepStorage]);
    }
  });
  for (const StateScales& each : scales) check_scales(each, job, storages);
  check_disjoint(lists, scales, job, storages);
  require(factors.size() <= 2, "factors");
  for (const Number& factor : factors) check_number(factor, job.device);
  for (const Number* number : numbers) check_number(*number, job.device);
  if (found_inf.has_value()) check_one(*found_inf, job.device, at::kFloat, false);
  if (lazy) {  // materialize copy-on-write outputs here: several threads at once would each copy them
    for (const StepList& list : lists) {
      for (size_t i = 0; i < params.size(); ++i) {
        const at::Tensor& t = (*list.tensors)[i];
        job.rows[i].data[list.place] = list.written ? t.mutable_data_ptr() : const_cast<void*>(t.const_data_ptr());
      }
    }
  }
  for (const Number& factor : factors) job.kept.push_back(apart<Loop>(factor, lists, job));
  for (size_t k = 0; k < factors.size(); ++k) job.unscale.factors[k] = scalar<Loop, float>(job.kept[k]);
  if (found_inf.has_value()) job.found_inf = found_inf->const_data_ptr<float>();
  return job;
}

inline void bump_scales(const Tensors& scales) {
  for (size_t i = 0; i < scales.size(); ++i) bump(scales[i]);
}

inline void bump_lists(const std::vector<StepList>& lists, const Tensors& steps) {
  for_each_index(lists[1].tensors->size(), [&](size_t i) {
    for (const StepList& list : lists) {
      if (!list.written) continue;
      list.tensors->prefetch_versions(i);
      bump((*list.tensors)[i]);
    }
    if (steps.empty()) return;
    steps.prefetch_versions(i);
    bump(steps[i]);
  });
}

// ---------------------------------------------------------------------------------------------------------------------
// The steps

inline constexpr std::initializer_list<at::ScalarType> kAny{at::kFloat, at::kHalf, at::kBFloat16};
inline constexpr std::initializer_list<at::ScalarType> kHalves{at::kHalf, at::kBFloat16};
inline constexpr std::initializer_list<at::ScalarType> kMasters{at::kFloat, at::kShort, at::kBFloat16};
inline constexpr std::initializer_list<at::ScalarType> kSingle{at::kFloat};
inline constexpr std::initializer_list<at::ScalarType> kSigned{at::kFloat, at::kChar}, kUnsigned{at::kFloat, at::kByte};
inline constexpr std::initializer_list<at::ScalarType> kCodes{at::kChar, at::kByte, at::kFloat8_e4m3fn};
inline constexpr std::initializer_list<at::ScalarType> kSplitHalf{at::kShort};
inline constexpr std::initializer_list<at::ScalarType> kSplitWeight{at::kBFloat16};

// The lists that every optimizer has. The parameters are the second list, with which checks compare all other lists.
inline std::vector<StepList> step_lists(const Tensors& grads, const Tensors& params, const Tensors& low) {
  std::vector<StepList> lists{{&grads, kGrad, false, kAny}, {&params, kParam, true, kMasters}};
  if (!low.empty()) lists.push_back({&low, kWeight, true, kHalves});
  return lists;
}

template <class Loop>
void Steps<Loop>::split(const Tensors& masters, const Tensors& weights, const Tensors& halves) {
  const std::vector<StepList> lists{
      {&masters, kGrad, false, kSingle}, {&halves, kParam, true, kSplitHalf}, {&weights, kWeight, true, kSplitWeight}};
  Loop::split(check_steps<Loop>(lists, Tensors(), {}, {}, std::nullopt));
  bump_lists(lists, Tensors());
}

template <class Loop>
void Steps<Loop>::stochastic_round(const Tensors& masters, const Tensors& weights, int64_t seed, const IntList& draws) {
  const std::vector<StepList> lists{{&masters, kGrad, false, kSingle}, {&weights, kParam, true, kSplitWeight}};
  Loop::stochastic_round(check_steps<Loop>(lists, Tensors(), {}, {}, std::nullopt, {}, false, seed, draws));
  bump_lists(lists, Tensors());
}

template <class Loop>
void Steps<Loop>::encode(const Tensors& values, const Tensors& codes, const Tensors& scales) {
  const std::vector<StepList> lists{{&values, kGrad, false, kAny}, {&codes, kState, true, kCodes}};
  const StepJob job = check_steps<Loop>(lists, Tensors(), {}, {}, std::nullopt, {{&lists[1], &scales}});
  Loop::encode(job);
  bump_lists(lists, Tensors());
  bump_scales(scales);
}

template <class Loop>
void Steps<Loop>::decode(const Tensors& codes, const Tensors& values, const Tensors& scales) {
  const std::vector<StepList> lists{{&values, kGrad, true, kAny}, {&codes, kState, false, kCodes}};
  const StepJob job = check_steps<Loop>(lists, Tensors(), {}, {}, std::nullopt, {{&lists[1], &scales}});
  Loop::decode(job);
  bump_lists(lists, Tensors());
}

template <class Loop>
void Steps<Loop>::join(const Tensors& weights, const Tensors& halves, const Tensors& masters) {
  const std::vector<StepList> lists{
      {&masters, kGrad, true, kSingle}, {&halves, kParam, false, kSplitHalf}, {&weights, kWeight, false, kSplitWeight}};
  Loop::join(check_steps<Loop>(lists, Tensors(), {}, {}, std::nullopt));
  bump_lists(lists, Tensors());
}

template <class Loop>
void Steps<Loop>::adam(const Tensors& grads, const Tensors& params, const Tensors& exp_avgs, const Tensors& exp_avg_sqs,
                       const Tensors& max_exp_avg_sqs, const Tensors& steps, const Tensors& low,
                       const Tensors& exp_avg_scales, const Tensors& exp_avg_sq_scales, const Number& lr,
                       const Number& step, const std::vector<Number>& factors, const MaybeTensor& found_inf,
                       double beta1, double beta2, double eps, double weight_decay, bool decoupled, bool maximize,
                       bool bias_correction, int64_t seed, const IntList& draws) {
  std::vector<StepList> lists = step_lists(grads, params, low);
  const StepList averages{&exp_avgs, kState, true, kSigned}, squares{&exp_avg_sqs, kSecond, true, kUnsigned};
  lists.insert(lists.end(), {averages, squares});
  const bool amsgrad = !max_exp_avg_sqs.empty();
  if (amsgrad) lists.push_back({&max_exp_avg_sqs, StepPlace(kState + 2), true, kSingle});
  StepJob job =
      check_steps<Loop>(lists, steps, factors, {&lr, &step}, found_inf,
                        {{&averages, &exp_avg_scales}, {&squares, &exp_avg_sq_scales}}, maximize, seed, draws);
  const Number rate = apart<Loop>(lr, lists, job), count = apart<Loop>(step, lists, job);
  const AdamRule rule{{beta1, beta2, weight_decay, decoupled, bias_correction},
                      scalar<Loop, double>(rate),
                      scalar<Loop, double>(count)};
  const auto run = [&](auto functor) {
    functor.weight_decay = static_cast<float>(decoupled ? 0 : weight_decay);
    functor.weight1 = static_cast<float>(1 - beta1);
    functor.beta2 = static_cast<float>(beta2);
    functor.weight2 = static_cast<float>(1 - beta2);
    functor.eps = static_cast<float>(eps);
    return Loop::step(job, functor, rule);
  };
  if (!(amsgrad ? run(Adam<true>()) : run(Adam<false>()))) return;
  bump_lists(lists, steps);
  bump_scales(exp_avg_scales);
  bump_scales(exp_avg_sq_scales);
}

template <class Loop>
void Steps<Loop>::sgd(const Tensors& grads, const Tensors& params, const Tensors& momentum_buffers, const Tensors& low,
                      const Tensors& momentum_scales, const Number& lr, const std::vector<Number>& factors,
                      const MaybeTensor& found_inf, double momentum, double dampening, double weight_decay,
                      bool nesterov, bool maximize, bool first_run, int64_t seed, const IntList& draws) {
  std::vector<StepList> lists = step_lists(grads, params, low);
  const StepList buffers{&momentum_buffers, kState, true, kSigned};
  if (momentum != 0) lists.push_back(buffers);
  std::vector<StateScales> scales;
  if (momentum != 0) scales.push_back({&buffers, &momentum_scales});
  StepJob job = check_steps<Loop>(lists, Tensors(), factors, {&lr}, found_inf, scales, maximize, seed, draws);
  const Number rate = apart<Loop>(lr, lists, job);
  const SgdRule rule{scalar<Loop, double>(rate)};
  const auto run = [&](auto functor) {
    functor.weight_decay = static_cast<float>(weight_decay);
    functor.momentum = static_cast<float>(momentum);
    functor.weight = static_cast<float>(1 - dampening);
    functor.nesterov = nesterov;
    functor.first_run = first_run;
    return Loop::step(job, functor, rule);
  };
  if (!(momentum != 0 ? run(Sgd<true>()) : run(Sgd<false>()))) return;
  bump_lists(lists, Tensors());
  bump_scales(momentum_scales);
}

}  // namespace amp_patch

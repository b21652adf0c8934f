// csrc's ops over loops that read the numbers of a call late, as the blocks of a GPU may: before each element, when the
// elements before it are written. tests/multi_tensor/test_late_reads.py builds it.
#include <torch/extension.h>

#include "../../csrc/kernels/ops.h"
#include "../../csrc/kernels/step_ops.h"

namespace amp_patch {
namespace {

struct LateLoop {
  static constexpr c10::DeviceType device = c10::DeviceType::CPU;
  static constexpr bool reads_late = true;

  template <class T, int N, class F>
  static void run(const Job<N>& job, const F& f) {
    for (const int64_t i : job.indices) {
      const Fact& out = (*job.out_facts)[i];
      for (int64_t e = 0; e < out.numel; ++e) {
        F late = f;
        late.prepare((*job.in_facts[0])[i].dtype, out.dtype);
        const auto element = [&](const Fact& fact) -> T& { return reinterpret_cast<T*>(fact.data)[e]; };
        if constexpr (N == 1) {
          element(out) = late(element((*job.in_facts[0])[i]));
        } else {
          element(out) = late(element((*job.in_facts[0])[i]), element((*job.in_facts[1])[i]));
        }
      }
    }
  }
};

struct LateSteps {
  static constexpr c10::DeviceType device = c10::DeviceType::CPU;
  static constexpr bool reads_late = true;

  template <class F, class Rule>
  static bool step(const StepJob& job, F f, const Rule& rule) {
    for (const StepRow& row : job.rows) {
      const auto list = [&](int place) { return static_cast<float*>(row.data[place]); };
      for (int64_t e = 0; e < row.size; ++e) {
        f.unscale = job.unscale.unscale();
        float states[3] = {};
        for (int k = 0; k < F::kStates; ++k) states[k] = list(kState + k)[e];
        f.template step<false>(rates(rule), list(kGrad)[e], list(kParam)[e], states);
        for (int k = 0; k < F::kStates; ++k) list(kState + k)[e] = states[k];
      }
    }
    return true;
  }

 private:
  static AdamRates rates(const AdamRule& rule) { return rule.count(nullptr); }
  static SgdRates rates(const SgdRule& rule) { return rule.rates(); }
};

using List = std::vector<at::Tensor>;

struct Lists {
  std::vector<Tensors> of;

  explicit Lists(const std::vector<List>& given) : of(given.size()) {
    for (size_t k = 0; k < given.size(); ++k) {
      for (const at::Tensor& t : given[k]) of[k].push_back(t);
    }
  }
};

void scale(const List& src, const List& dst, const Number& factor) {
  const Lists lists({src, dst});
  Ops<LateLoop>::scale(lists.of[0], lists.of[1], factor, std::nullopt);
}

void axpby(const Number& a, const List& x, const Number& b, const List& y, const List& out) {
  const Lists lists({x, y, out});
  Ops<LateLoop>::axpby(lists.of[0], lists.of[1], lists.of[2], a, b, std::nullopt, true, true);
}

void adam(const List& grads, const List& params, const List& first, const List& second, const Number& lr,
          const Number& step, const std::vector<Number>& factors) {
  const Lists lists({grads, params, first, second});
  const Tensors none;
  Steps<LateSteps>::adam(lists.of[0], lists.of[1], lists.of[2], lists.of[3], none, none, none, none, none, lr, step,
                         factors, std::nullopt, 0.9, 0.99, 1e-8, 0.1, true, false, true, 0, {}, {});
}

void sgd(const List& grads, const List& params, const List& buffers, const Number& lr,
         const std::vector<Number>& factors) {
  const Lists lists({grads, params, buffers});
  const Tensors none;
  Steps<LateSteps>::sgd(lists.of[0], lists.of[1], lists.of[2], none, none, lr, factors, std::nullopt, 0.9, 0, 0.1,
                        false, false, false, 0, {}, {});
}

}  // namespace
}  // namespace amp_patch

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("scale", &amp_patch::scale);
  m.def("axpby", &amp_patch::axpby);
  m.def("adam", &amp_patch::adam);
  m.def("sgd", &amp_patch::sgd);
}

// The tensors of an optimizer's step, in one row for each parameter, and the numbers of its formula; for host and
// device.
#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>

#include "steps.h"

namespace amp_patch {

enum StepPlace { kGrad, kParam, kWeight, kState, kSecond, kPlaces = kState + 3 };

using StepScales = std::array<float*, kPlaces - kState>;  // of each state of a row; null: it is FP32, not codes

// The tensors at one index of the lists (gradient, parameter, weight, states), in one common memory order.
struct StepRow {
  void* data[kPlaces];  // null: no tensor
  float* step;          // the parameter's count of steps; null: all rows share one count
  int64_t size;
  // A state of int8 or uint8 is codes (codes.h), whose scales are in the job. A parameter of int16 is the low half of a
  // split master, whose high half is the bfloat16 weight. A parameter of bfloat16 is a weight without a master, which
  // is rounded stochastically.
  c10::ScalarType dtype[kPlaces];
  uint64_t draw;  // selects the random bits, with the job's seed
};

// The numbers of Adam. lr and the count of steps are host numbers, or in device memory.
struct AdamRule {
  using Rates = AdamRates;
  static constexpr bool kCounts = true;  // rates differ from tensor to tensor
  AdamNumbers numbers;
  Scalar<double> lr, steps;  // `steps`: the number of steps before this one, if the rows have no counts

  // Adds 1 to the row's count of steps (null: uses `steps`), and returns the rates of this step.
  C10_HOST_DEVICE Rates count(float* step) const {
    Scalar<double> rate = lr, before = steps;
    rate.load();
    before.load();
    if (step == nullptr) return numbers.rates(rate.value, before.value + 1);
    *step += 1;
    return numbers.rates(rate.value, *step);
  }
};

struct SgdRule {
  using Rates = SgdRates;
  static constexpr bool kCounts = false;
  Scalar<double> lr;

  C10_HOST_DEVICE Rates rates() const {
    Scalar<double> rate = lr;
    rate.load();
    return {static_cast<float>(-rate.value)};
  }
};

// The two factors that a gradient is multiplied by. `maximize` negates the second one.
struct UnscaleRule {
  Scalar<float> factors[2];
  bool maximize;

  C10_HOST_DEVICE Unscale unscale() const {
    Scalar<float> first = factors[0], second = factors[1];
    first.load();
    second.load();
    return {{first.value, maximize ? -second.value : second.value}};
  }
};

}  // namespace amp_patch

// Tensors rounded to FP8 and FP4 with scales, on the CPU, in two passes over memory. The results have the same bits as
// the plain torch code in amp_patch/casts/formats.py.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define AMP_PATCH_X86 1
#endif

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../kernels/random.h"

namespace amp_patch {

size_t instruction_set();  // kernels/cpu.cpp

namespace [[gnu::visibility("hidden")]] casts {
namespace {

using at::Tensor;

constexpr int64_t kGrain = 32768;  // elements: the least work worth a thread, as torch's GRAIN_SIZE
constexpr int64_t kWide = 1024;    // columns per step in a band of few rows
constexpr int64_t kNarrow = 64;    // columns per step in a band of many rows: threads share the few bands by steps
constexpr int64_t kTall = 64;      // rows from which a band has many
constexpr uint32_t kInfinity = 0x7F800000u;

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// A format of numbers with few bits: `Element` in formats.py.
struct Format {
  Format(int64_t mantissa, int64_t least, double most)
      : largest(float(most)),
        least_exponent(uint32_t(127 + least) << 23),
        to_magic(uint32_t(23 - mantissa) << 23),
        to_step(uint32_t(mantissa) << 23),
        exponent_of_largest(int64_t(bits_of_float(float(most)) >> 23) - 127) {}
  float largest;
  uint32_t least_exponent;  // the least exponent of normal numbers, as FP32 bits
  uint32_t to_magic;        // plus a number's exponent: the exponent of 2**23 format steps
  uint32_t to_step;         // a number's exponent minus this: the exponent of the format's step
  int64_t exponent_of_largest;
};

namespace portable {
#include "formats_loops.h"
}
#ifdef AMP_PATCH_X86
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
namespace avx2 {
#include "formats_loops.h"
}
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")
namespace avx512 {
#include "formats_loops.h"
}
#pragma GCC pop_options
#endif

// Calls visit(Set()) with the chosen instruction set.
template <class Visit>
auto on_set(const Visit& visit) {
#ifdef AMP_PATCH_X86
  switch (instruction_set()) {
    case 2:
      return visit(avx512::Set());
    case 1:
      return visit(avx2::Set());
    default:
      break;
  }
#endif
  return visit(portable::Set());
}

// ---------------------------------------------------------------------------------------------------------------------
// Scales: `Scale` in formats.py describes each

enum class Kind { exact, up, floor, two_levels };

Kind kind_named(const std::string& name) {
  if (name == "exact") return Kind::exact;
  if (name == "up") return Kind::up;
  if (name == "floor") return Kind::floor;
  if (name == "two_levels") return Kind::two_levels;
  throw std::invalid_argument("quantize: no scale is called " + name);
}

struct Scale {
  float divide, multiply;
};

float power_of_two(int64_t exponent) {
  return float_of_bits(uint32_t(std::clamp<int64_t>(exponent + 127, 1, 254)) << 23);
}

// The scale of a tile from the bits of its largest magnitude. `whole`: if the kind has two levels of scales, the scale
// of the whole tensor.
Scale scale_of(Kind kind, const Format& format, uint32_t largest, float whole) {
  if (largest >= kInfinity) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    return {nan, nan};
  }
  const float ratio = float_of_bits(largest) / format.largest;
  if (kind == Kind::exact) {
    const float scale = ratio > 0 ? ratio : 1.0f;
    return {scale, 1.0f};
  }
  if (kind == Kind::two_levels) {
    static const Format e4m3(3, -6, 448.0);
    const float one = 1.0f, given = ratio / whole;
    float scale;
    portable::to_nearest(&given, 1, e4m3, &one, &one, &scale);
    const float both = scale * whole;
    return {both == 0 ? std::numeric_limits<float>::infinity() : both, scale};
  }
  const uint32_t bits = kind == Kind::up ? bits_of_float(ratio) : largest;
  int64_t exponent = int64_t(bits >> 23) - 127;
  if (kind == Kind::up) exponent += (bits & 0x007FFFFFu) != 0;
  if (kind == Kind::floor) exponent -= format.exponent_of_largest;
  const float scale = power_of_two(exponent);
  return {scale, scale};
}

// ---------------------------------------------------------------------------------------------------------------------
// One tensor

// The bits of the largest magnitude in `count` elements.
template <class Element>
uint32_t largest_of(const Element* x, int64_t count) {
  std::atomic<int32_t> largest{0};
  at::parallel_for(0, (count + kGrain - 1) / kGrain, 1, [&](int64_t begin, int64_t end) {
    std::vector<int32_t> columns(kWide);
    int32_t mine = 0;
    for (int64_t i = begin * kGrain; i < std::min(count, end * kGrain); i += kWide) {
      const int64_t n = std::min({kWide, count - i, end * kGrain - i});
      on_set([&](auto set) { set.tile_maxima(x + i, 1, n, n, n, columns.data()); });
      mine = std::max(mine, columns[0]);
    }
    int32_t seen = largest.load();
    while (seen < mine && !largest.compare_exchange_weak(seen, mine)) {
    }
  });
  return uint32_t(largest.load());
}

// 16 random bits for the elements from `first` on of a tensor, by the counter of random.h.
void draw_bits(int64_t key, int64_t draw, int64_t first, int64_t count, uint16_t* bits) {
  uint32_t words[4];
  int64_t group = -1;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = first + i;
    if (at / kDrawn != group) {
      group = at / kDrawn;
      random_words(uint64_t(key), uint64_t(draw), uint64_t(group), words);
    }
    const int64_t lane = at % kDrawn;
    bits[i] = uint16_t(words[lane / 2] >> (lane % 2 * 16));
  }
}

template <class Element>
std::pair<Tensor, std::optional<Tensor>> quantize_elements(const Tensor& given, const Element* x, int64_t tile_rows,
                                                           int64_t tile_columns, const Format& format, Kind kind,
                                                           std::optional<int64_t> draw, int64_t key) {
  const int64_t rows = given.size(-2), columns = given.size(-1),
                matrices = given.numel() / std::max<int64_t>(rows * columns, 1);
  Tensor values = at::empty(given.sizes(), given.options().dtype(at::kFloat));
  float* const out = values.data_ptr<float>();
  std::optional<Tensor> outer;
  float whole = 1.0f;
  const bool one_scale = tile_rows == 0;
  Scale shared{1.0f, 1.0f};
  if (one_scale || kind == Kind::two_levels) {
    const uint32_t largest = largest_of(x, given.numel());
    if (one_scale) {
      shared = scale_of(kind, format, largest, whole);
      if (kind == Kind::exact) whole = shared.divide;
    } else {
      whole = largest >= kInfinity ? std::numeric_limits<float>::quiet_NaN()
                                   : float_of_bits(largest) / format.largest / 448.0f;
      if (whole == 0) whole = 1.0f;
    }
    if (kind == Kind::exact || kind == Kind::two_levels) outer = at::scalar_tensor(whole, values.options());
  }
  if (given.numel() == 0) return {values, outer};
  const int64_t band = one_scale ? std::max<int64_t>(1, std::min(rows, kTall)) : std::min(tile_rows, rows);
  const int64_t tile = one_scale ? 1 : std::min(tile_columns, columns);
  int64_t chunk = band > kTall ? kNarrow : kWide;
  chunk = tile > chunk ? columns : chunk / tile * tile;
  chunk = std::min(chunk, columns);
  const int64_t bands = (rows + band - 1) / band, chunks = (columns + chunk - 1) / chunk;
  at::parallel_for(0, matrices * bands * chunks, std::max<int64_t>(1, kGrain / (band * chunk)),
                   [&](int64_t begin, int64_t end) {
                     std::vector<int32_t> largest(chunk);
                     std::vector<float> divide(chunk, shared.divide), multiply(chunk, shared.multiply);
                     std::vector<uint16_t> random(draw.has_value() ? chunk : 0);
                     on_set([&](auto set) {
                       for (int64_t unit = begin; unit < end; ++unit) {
                         const int64_t matrix = unit / (bands * chunks), row = unit / chunks % bands * band,
                                       column = unit % chunks * chunk;
                         const int64_t first = (matrix * rows + row) * columns + column;
                         const int64_t height = std::min(band, rows - row), width = std::min(chunk, columns - column);
                         if (!one_scale) {
                           set.tile_maxima(x + first, height, columns, width, tile, largest.data());
                           for (int64_t t = 0; t * tile < width; ++t) {
                             const Scale scale = scale_of(kind, format, uint32_t(largest[t]), whole);
                             const int64_t from = t * tile, to = std::min(from + tile, width);
                             std::fill(divide.begin() + from, divide.begin() + to, scale.divide);
                             std::fill(multiply.begin() + from, multiply.begin() + to, scale.multiply);
                           }
                         }
                         for (int64_t r = 0; r < height; ++r) {
                           const int64_t at = first + r * columns;
                           if (draw.has_value()) draw_bits(key, *draw, at, width, random.data());
                           set.round(x + at, width, format, divide.data(), multiply.data(),
                                     draw.has_value() ? random.data() : nullptr, out + at);
                         }
                       }
                     });
                   });
  return {values, outer};
}

// `quantize_plainly` of formats.py: (values, the tensor's own scale or None).
std::pair<Tensor, std::optional<Tensor>> quantize(const Tensor& x, int64_t tile_rows, int64_t tile_columns,
                                                  int64_t mantissa, int64_t least, double most,
                                                  const std::string& scale, std::optional<int64_t> draw, int64_t key) {
  const Format format(mantissa, least, most);
  const Kind kind = kind_named(scale);
  TORCH_CHECK(x.is_cpu() && x.is_contiguous() && x.dim() >= 2, "quantize: wanted a contiguous CPU tensor of matrices");
  if (x.scalar_type() == at::kFloat) {
    return quantize_elements(x, x.data_ptr<float>(), tile_rows, tile_columns, format, kind, draw, key);
  }
  TORCH_CHECK(x.scalar_type() == at::kBFloat16, "quantize: wanted bfloat16 or float32, got ", x.scalar_type());
  const auto* bits = reinterpret_cast<const uint16_t*>(x.data_ptr<at::BFloat16>());
  return quantize_elements(x, bits, tile_rows, tile_columns, format, kind, draw, key);
}

// `hadamard_plainly` of formats.py.
Tensor hadamard(const Tensor& x, int64_t signs) {
  TORCH_CHECK(x.is_cpu() && x.is_contiguous() && x.dim() >= 2 && x.scalar_type() == at::kBFloat16,
              "hadamard: wanted a contiguous CPU tensor of matrices in bfloat16");
  const int64_t rows = x.size(-2), columns = x.size(-1), matrices = x.numel() / std::max<int64_t>(rows * columns, 1);
  const int64_t bands = (rows + 15) / 16;
  auto sizes = x.sizes().vec();
  sizes[sizes.size() - 2] = bands * 16;
  Tensor result = at::empty(sizes, x.options().dtype(at::kFloat));
  float* const out = result.data_ptr<float>();
  const auto* bits = reinterpret_cast<const uint16_t*>(x.data_ptr<at::BFloat16>());
  at::parallel_for(0, matrices * bands, std::max<int64_t>(1, kGrain / std::max<int64_t>(16 * columns, 1)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t unit = begin; unit < end; ++unit) {
                       const int64_t matrix = unit / bands, row = unit % bands * 16;
                       for (int64_t c = 0; c < columns; c += kWide) {
                         const uint16_t* const from = bits + (matrix * rows + row) * columns + c;
                         float* const to = out + (matrix * bands * 16 + row) * columns + c;
                         on_set([&](auto set) {
                           set.transform(from, std::min<int64_t>(16, rows - row), columns, std::min(kWide, columns - c),
                                         uint32_t(signs), to, columns);
                         });
                       }
                     }
                   });
  return result;
}

// The sum of the bits of a contiguous BF16 tensor.
int64_t sum_of_bits(const Tensor& x) {
  TORCH_CHECK(x.is_cpu() && x.is_contiguous() && x.scalar_type() == at::kBFloat16, "sum_of_bits: wanted bfloat16");
  const auto* bits = reinterpret_cast<const uint16_t*>(x.data_ptr<at::BFloat16>());
  return on_set([&](auto set) { return set.sum(bits, x.numel()); });
}

}  // namespace

void bind_formats(py::module_& m) {
  using release = py::call_guard<py::gil_scoped_release>;
  m.def("quantize", &quantize, release());  // as quantize_plainly of formats.py
  m.def("hadamard", &hadamard, release());
  m.def("sum_of_bits", &sum_of_bits, release());
}

}  // namespace casts
}  // namespace amp_patch

// The innermost loops of formats.cpp, which includes this file once for each instruction set (so there is no `#pragma
// once`). Plain loops without branches, which the compiler vectorizes; every set gives the same bits.

// The FP32 bits of an element: a BF16 number in a uint16_t, or an FP32 number.
inline uint32_t bits_of(uint16_t bfloat16) { return uint32_t{bfloat16} << 16; }
inline uint32_t bits_of(float value) { return bits_of_float(value); }

// largest[c] = max(largest[c], |x| of column c) over the rows, as FP32 bits, whose order is that of the numbers; NaN is
// above infinity.
template <class Element>
void column_maxima(const Element* x, int64_t rows, int64_t stride, int64_t columns, int32_t* largest) {
  for (int64_t r = 0; r < rows; ++r, x += stride) {
    for (int64_t c = 0; c < columns; ++c) {
      const int32_t magnitude = int32_t(bits_of(x[c]) & 0x7FFFFFFFu);
      largest[c] = magnitude > largest[c] ? magnitude : largest[c];
    }
  }
}

inline int32_t maximum(const int32_t* values, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = values[i] > largest ? values[i] : largest;
  return largest;
}

// The sum of the bits of BF16 numbers, as int16.
inline int64_t sum_of_bits(const uint16_t* x, int64_t count) {
  int64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += int16_t(x[i]);
  return sum;
}

// out[c] = x[c] / divide[c] rounded to nearest, ties to even, in the format, times multiply[c].
template <class Element>
void to_nearest(const Element* x, int64_t count, const Format& format, const float* divide, const float* multiply,
                float* out) {
  const float most = format.largest;
  const uint32_t least = format.least_exponent, up = format.to_magic;
  for (int64_t c = 0; c < count; ++c) {
    const uint32_t bits = bits_of(x[c]), sign = bits & 0x80000000u;
    float value = float_of_bits(bits & 0x7FFFFFFFu) / divide[c];
    value = value > 2 * most ? 2 * most : value;
    uint32_t exponent = bits_of_float(value) & 0x7F800000u;
    exponent = exponent > least ? exponent : least;
    // This power of two, added to a number, leaves no room for digits below the format's last one: the addition rounds.
    const float magic = float_of_bits((exponent + up) | 0x00400000u);
    value = (value + magic) - magic;
    value = value > most ? most : value;
    out[c] = float_of_bits(bits_of_float(value) | sign) * multiply[c];
  }
}

// Like to_nearest, but rounds stochastically with 16 random bits per element: up with a probability in proportion to
// the distance from the number below.
template <class Element>
void by_chance(const Element* x, int64_t count, const Format& format, const float* divide, const float* multiply,
               const uint16_t* random, float* out) {
  const float most = format.largest;
  const uint32_t least = format.least_exponent, down = format.to_step;
  for (int64_t c = 0; c < count; ++c) {
    const uint32_t bits = bits_of(x[c]), sign = bits & 0x80000000u;
    float value = float_of_bits(bits & 0x7FFFFFFFu) / divide[c];
    const bool nan = value != value;
    value = value > most ? most : value;
    uint32_t exponent = bits_of_float(value) & 0x7F800000u;
    exponent = exponent > least ? exponent : least;
    const float step = float_of_bits(exponent - down);
    const float chance = float(int32_t(random[c])) * 0x1p-16f;
    const float steps = value / step + chance;
    const float whole = float(int32_t(nan ? 0.0f : steps));
    value = nan ? value : whole * step;
    value = value > most ? most : value;
    out[c] = float_of_bits(bits_of_float(value) | sign) * multiply[c];
  }
}

// Hadamard's matrix of order 16, times 16 rows of x with signs changed by `signs`, divided by 4, so that the matrix is
// orthogonal. `out` has 16 rows of `columns`; missing rows of x count as zeros.
inline void hadamard(const uint16_t* x, int64_t rows, int64_t stride, int64_t columns, uint32_t signs, float* out,
                     int64_t out_stride) {
  for (int64_t r = 0; r < 16; ++r) {
    const uint32_t flip = (signs >> r & 1u) << 31;
    for (int64_t c = 0; c < columns; ++c) {
      out[r * out_stride + c] = r < rows ? float_of_bits(bits_of(x[r * stride + c]) ^ flip) : 0.0f;
    }
  }
  for (int64_t half = 1; half < 16; half *= 2) {
    const float factor = half == 8 ? 0.25f : 1.0f;
    for (int64_t r = 0; r < 16; ++r) {
      if (r & half) continue;
      float* const a = out + r * out_stride;
      float* const b = out + (r + half) * out_stride;
      for (int64_t c = 0; c < columns; ++c) {
        const float sum = a[c] + b[c], difference = a[c] - b[c];
        a[c] = sum * factor;
        b[c] = difference * factor;
      }
    }
  }
}

struct Set {
  template <class Element>
  static void tile_maxima(const Element* x, int64_t rows, int64_t stride, int64_t columns, int64_t tile,
                          int32_t* largest) {
    std::fill(largest, largest + columns, 0);
    column_maxima(x, rows, stride, columns, largest);
    if (tile == 1) return;
    for (int64_t c = 0; c < columns; c += tile) {
      largest[c / tile] = maximum(largest + c, std::min(tile, columns - c));
    }
  }
  template <class Element>
  static void round(const Element* x, int64_t count, const Format& format, const float* divide, const float* multiply,
                    const uint16_t* random, float* out) {
    if (random != nullptr) {
      by_chance(x, count, format, divide, multiply, random, out);
    } else {
      to_nearest(x, count, format, divide, multiply, out);
    }
  }
  static int64_t sum(const uint16_t* x, int64_t count) { return sum_of_bits(x, count); }
  static void transform(const uint16_t* x, int64_t rows, int64_t stride, int64_t columns, uint32_t signs, float* out,
                        int64_t out_stride) {
    hadamard(x, rows, stride, columns, signs, out, out_stride);
  }
};

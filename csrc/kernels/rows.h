// The metadata of tensors for a launch on a device: one row for each place in the lists, built on the host. Nothing
// here calls CUDA, so that the tests (emulate.cpp) run it on any machine.
#pragma once

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "plan.h"

namespace amp_patch {

constexpr int kThreads = 256;  // threads of a block; a block does one chunk
constexpr int kDims = 6;       // dimensions that index arithmetic handles, after merging

// A tensor as the host sees it.
struct View {
  void* data;
  c10::ScalarType dtype;
  int64_t dims;
  const int64_t* sizes;
  const int64_t* strides;
};

// K tensors, the inputs and then the output, with their elements contiguous and in one common order.
template <int K>
struct Row {
  static constexpr bool strided = false;
  static constexpr int kResident = 4;  // blocks that run at once on a multiprocessor: kernels are compiled for so many
  void* data[K];
  int64_t size;    // elements; a launch may end before the last
  uint32_t first;  // the index, in the launch, of the block that begins this row
  int32_t index;   // its place in the lists
  c10::ScalarType dtype[K];
  uint8_t width;  // elements of one memory access: as many as alignment allows

  // Removes the elements before `from`.
  void begin_at(int64_t from) {
    for (int k = 0; k < K; ++k) {
      data[k] = static_cast<char*>(data[k]) + from * static_cast<int64_t>(c10::elementSize(dtype[k]));
    }
    size -= from;
  }
};

// K tensors in any memory order. The index of element i, counted with the last dimension fastest, gives its place.
template <int K>
struct StridedRow : Row<K> {
  static constexpr bool strided = true;
  int64_t begin;  // the launch's first element
  int64_t sizes[kDims];
  int64_t strides[K][kDims];
  int32_t dims;
  bool narrow;  // element numbers fit 32 bits, which divide faster

  void begin_at(int64_t from) { begin = from; }
};

enum class Layout { kLinear, kStrided, kScattered };  // kScattered: more than kDims dimensions

// The widest access at which all tensors are aligned, up to 16 bytes each. Chunks are multiples of it.
template <int K>
uint8_t width_of(const Row<K>& row) {
  for (const int width : {8, 4, 2}) {
    bool fits = true;
    for (int k = 0; k < K; ++k) {
      const auto bytes = static_cast<int64_t>(c10::elementSize(row.dtype[k])) * width;
      fits = fits && bytes <= 16 && (reinterpret_cast<uintptr_t>(row.data[k]) & (bytes - 1)) == 0;
    }
    // An access of two elements pays only for float64.
    if (fits && (width > 2 || row.dtype[0] == c10::ScalarType::Double)) return static_cast<uint8_t>(width);
  }
  return 1;
}

// The row of tensors that are known to be contiguous. For thousands of small tensors, the general function, place(),
// takes longer than the launch.
template <int K>
Row<K> contiguous_row(const std::array<void*, K>& data, const std::array<c10::ScalarType, K>& dtype, int64_t size,
                      int64_t index) {
  Row<K> row;
  std::copy(data.begin(), data.end(), row.data);
  std::copy(dtype.begin(), dtype.end(), row.dtype);
  row.size = size;
  row.first = 0;
  row.index = static_cast<int32_t>(index);
  row.width = width_of<K>(row);
  return row;
}

// Fills `row` from `views`, which have the same sizes, and returns their layout. kStrided: all of `row` is filled.
// kLinear: only its base, Row<K>. kScattered: `row` must not be used.
template <int K>
Layout place(const std::array<View, K>& views, int64_t index, StridedRow<K>& row) {
  constexpr int64_t kMost = 64;
  const View& lead = views[K - 1];  // the output, if there is one: its order makes writes coalesce
  if (lead.dims > kMost) return Layout::kScattered;
  row.size = 1;
  row.first = 0;
  row.index = static_cast<int32_t>(index);
  row.begin = 0;
  for (int k = 0; k < K; ++k) {
    row.data[k] = views[k].data;
    row.dtype[k] = views[k].dtype;
  }

  // Elements are independent, so dimensions may be taken in any order: by the strides of `lead`, outermost first.
  std::array<int, kMost> order;
  int dims = 0;
  for (int d = 0; d < lead.dims; ++d) {
    row.size *= lead.sizes[d];
    if (lead.sizes[d] != 1) order[dims++] = d;
  }
  std::sort(order.begin(), order.begin() + dims, [&](int a, int b) {  // stable, since no two dimensions compare equal
    return lead.strides[a] != lead.strides[b] ? lead.strides[a] > lead.strides[b] : a < b;
  });

  // Two neighboring dimensions merge if, in every tensor, one step of the outer one spans exactly the inner one.
  std::array<int64_t, kMost> sizes;
  std::array<std::array<int64_t, kMost>, K> strides;
  int merged = 0;
  for (int i = 0; i < dims; ++i) {
    const int d = order[i];
    bool merges = merged > 0;
    for (int k = 0; k < K && merges; ++k) merges = strides[k][merged - 1] == views[k].strides[d] * lead.sizes[d];
    if (!merges) sizes[merged++] = 1;
    sizes[merged - 1] *= lead.sizes[d];
    for (int k = 0; k < K; ++k) strides[k][merged - 1] = views[k].strides[d];
  }

  bool linear = merged <= 1;
  for (int k = 0; k < K && merged == 1; ++k) linear = linear && strides[k][0] == 1;
  row.width = linear ? width_of<K>(row) : 1;
  if (linear) return Layout::kLinear;
  if (merged > kDims) return Layout::kScattered;
  row.dims = merged;
  row.narrow = row.size <= INT32_MAX;
  for (int d = 0; d < merged; ++d) {
    row.sizes[d] = sizes[d];
    for (int k = 0; k < K; ++k) row.strides[k][d] = strides[k][d];
  }
  return Layout::kStrided;
}

// The elements of a chunk: a multiple of kPass, with which the blocks fill kWaves waves. (A further wave of few blocks
// would leave most of the GPU idle.) The result depends only on the sizes, because kSlots is a constant. So the partial
// sums of norms, one per chunk, are the same on every machine.
template <class R>
int64_t chunk_size(const std::vector<R>& rows) {
  constexpr int64_t kSlots = 132 * R::kResident;  // the blocks that run at once on an H100
  constexpr int64_t kWaves = 4;  // fewer: the GPU idles while the longest block ends; more: more starts
  constexpr int64_t kBlocks = kWaves * kSlots;
  constexpr int64_t kPass = 4 * kThreads;  // elements: with longer steps, the last wave of short chunks is half empty
  constexpr int64_t kLeast = 4096;         // elements
  constexpr int64_t kMost = 131072;        // elements; a large model has more waves instead of longer chunks
  int64_t total = 0;
  for (const R& row : rows) total += std::min(row.size, kMost * kBlocks);  // clamped: the sum of sizes may overflow
  // Each tensor may add a block that is only partly filled. With very many tensors most are shorter than a block.
  const int64_t filled = std::max(kBlocks - static_cast<int64_t>(rows.size()), kBlocks / 2);
  return std::clamp((total / filled / kPass + 1) * kPass, kLeast, kMost);
}

// Numbers the blocks of one launch over all rows, in the order of the rows; returns the number of blocks.
template <class R>
int64_t number_blocks(std::vector<R>& rows, int64_t chunk) {
  int64_t blocks = 0;
  for (R& row : rows) {
    row.first = static_cast<uint32_t>(blocks);
    blocks += (row.size + chunk - 1) / chunk;
  }
  return blocks;
}

// Divides rows that are too many for one launch, or have too many blocks, into spans for several launches.
template <class R>
std::vector<std::vector<Span>> plan_rows(const std::vector<R>& rows, int64_t chunk, int64_t max_rows,
                                         int64_t max_blocks) {
  std::vector<int64_t> sizes;
  sizes.reserve(rows.size());
  for (const R& row : rows) sizes.push_back(row.size);
  return plan_spans(sizes, chunk, max_rows, max_blocks);
}

// Writes a launch's rows to `out`, one per span; returns the number of its blocks.
template <class R>
int64_t fill(R* out, const std::vector<R>& rows, const std::vector<Span>& spans, int64_t chunk) {
  int64_t blocks = 0;
  for (const Span& span : spans) {
    R row = rows[span.tensor];
    row.begin_at(span.first * chunk);
    row.first = static_cast<uint32_t>(blocks);
    *out++ = row;
    blocks += span.count;
  }
  return blocks;
}

// Calls launch(count, write) for each of the launches that cover all rows, in order. One launch suffices unless the
// rows are more than max_rows or their blocks more than max_blocks. write(out) writes the launch's `count` rows to
// `out` and returns the number of its blocks. A GPU refuses a grid without blocks: if no row has elements, there is no
// launch.
template <class R, class Launch>
void for_each_launch(std::vector<R> rows, int64_t chunk, int64_t max_rows, int64_t max_blocks, const Launch& launch) {
  const int64_t blocks = number_blocks(rows, chunk);
  if (blocks == 0) return;
  const auto count = static_cast<int64_t>(rows.size());
  if (count <= max_rows && blocks <= max_blocks) {
    launch(count, [&](R* out) {
      std::copy(rows.begin(), rows.end(), out);
      return blocks;
    });
    return;
  }
  for (const auto& spans : plan_rows(rows, chunk, max_rows, max_blocks)) {
    launch(static_cast<int64_t>(spans.size()), [&](R* out) { return fill(out, rows, spans, chunk); });
  }
}

}  // namespace amp_patch

// How the kernels for CUDA are launched over rows of tensors, whatever a row holds; for .cu files.
//
// A launch learns of its rows in one of two ways. As kernel arguments, which CUDA copies at the launch, and into a
// graph that is being captured: nothing to keep alive. Or, where they do not fit, through one pinned buffer, copied on
// the stream; torch's allocators keep the buffer until the copy is done and the device's side until the kernel is. A
// captured copy would read the host's side again at each replay, so a capture takes arguments, in several launches.
#pragma once

#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <limits>
#include <vector>

#include "rows.h"

namespace amp_patch {

// Bytes of kernel arguments: CUDA 12.1 and later take 32,764 on sm_70 and newer, earlier ones 4,096. 256 of them are
// for the arguments beside the rows.
constexpr int kFewBytes = 4096 - 256;
constexpr int kManyBytes = CUDART_VERSION >= 12010 ? 32764 - 256 : kFewBytes;

template <class R, int kBytes>
struct Arguments {
  static constexpr int bytes = kBytes, capacity = kBytes / sizeof(R);
  R rows[capacity];
};

enum class Metadata { kAuto, kArguments, kBuffer };
inline std::atomic<Metadata> metadata{Metadata::kAuto};

// A newer runtime may meet an older driver.
inline bool driver_takes_large_arguments() {
  static const bool takes = [] {
    int version = 0;
    C10_CUDA_CHECK(cudaDriverGetVersion(&version));
    return version >= 12010;
  }();
  return takes;
}

inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    (void)cudaGetLastError();  // the legacy stream, while another one captures: do as in a capture
    return true;
  }
  return status != cudaStreamCaptureStatusNone;
}

// Of a launch: its rows, its blocks, and the elements of a block.
struct Extent {
  int rows;
  int64_t blocks;
  int chunk;
};

// Calls launch(arguments, buffer, extent) as often as it takes: once, but where a capture has very many rows. The rows
// are buffer's, or where that is null the arguments'. Arguments take at most kMostBytes.
template <int kMostBytes, class R, class Launch>
void launch_rows(const std::vector<R>& rows, c10::Device device, cudaStream_t stream, const Launch& launch) {
  constexpr int64_t few = Arguments<R, kFewBytes>::capacity, many = Arguments<R, kMostBytes>::capacity;
  constexpr int64_t kMaxBlocks = std::numeric_limits<int32_t>::max();  // of a grid's x
  std::vector<int64_t> sizes;
  sizes.reserve(rows.size());
  for (const R& row : rows) sizes.push_back(row.size);
  const int64_t chunk = chunk_size(sizes);
  const auto from_arguments = [&](auto arguments, const std::vector<Span>& spans) {
    static_assert(std::is_trivially_copyable_v<decltype(arguments)> && sizeof(arguments) <= arguments.bytes);
    const int64_t blocks = fill(arguments.rows, rows, spans, chunk);
    launch(arguments, static_cast<const R*>(nullptr),
           Extent{static_cast<int>(spans.size()), blocks, static_cast<int>(chunk)});
  };
  const auto from_buffer = [&](const std::vector<Span>& spans) {
    const auto bytes = static_cast<int64_t>(spans.size() * sizeof(R));
    const auto options = at::TensorOptions().dtype(at::kByte);
    const at::Tensor host = at::empty({bytes}, options.device(at::kCPU).pinned_memory(true));
    const at::Tensor buffer = at::empty({bytes}, options.device(device));
    const int64_t blocks = fill(static_cast<R*>(host.mutable_data_ptr()), rows, spans, chunk);
    buffer.copy_(host, /*non_blocking=*/true);
    launch(Arguments<R, kFewBytes>(), static_cast<const R*>(buffer.const_data_ptr()),
           Extent{static_cast<int>(spans.size()), blocks, static_cast<int>(chunk)});
  };

  const auto count = static_cast<int64_t>(rows.size());
  const int64_t most = driver_takes_large_arguments() ? many : few;
  const Metadata route = metadata.load();
  const bool fits = count <= most && route != Metadata::kBuffer;
  if (!fits && route != Metadata::kArguments && !is_capturing(stream)) {
    for (const auto& spans : plan_spans(sizes, chunk, count, kMaxBlocks)) from_buffer(spans);
  } else if (count <= few || most == few) {
    for (const auto& spans : plan_spans(sizes, chunk, few, kMaxBlocks)) {
      from_arguments(Arguments<R, kFewBytes>(), spans);
    }
  } else {
    for (const auto& spans : plan_spans(sizes, chunk, many, kMaxBlocks)) {
      from_arguments(Arguments<R, kMostBytes>(), spans);
    }
  }
}

}  // namespace amp_patch

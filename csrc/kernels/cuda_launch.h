// Launches of CUDA kernels over rows of tensors, for any type of row; for .cu files.
//
// Rows reach a kernel in one of two ways. As kernel arguments: CUDA copies them at the launch, and into a graph during
// capture, so nothing has to stay alive. If they do not fit: through one pinned buffer, copied on the stream. Torch's
// allocators keep the host's buffer until the copy is done, and the device's buffer until the kernel is. During capture
// rows are always arguments, in several launches, because each replay would read the host's buffer again.
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
// for arguments other than the rows.
constexpr int kFewBytes = 4096 - 256;
constexpr int kManyBytes = CUDART_VERSION >= 12010 ? 32764 - 256 : kFewBytes;

template <class R, int kBytes>
struct Arguments {
  static constexpr int bytes = kBytes, capacity = kBytes / sizeof(R);
  R rows[capacity];
};

enum class Metadata { kAuto, kArguments, kBuffer };
inline std::atomic<Metadata> metadata{Metadata::kAuto};

// The driver may be older than the runtime.
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
    // The query fails on the legacy stream while another stream captures: choose arguments, as in a capture.
    (void)cudaGetLastError();
    return true;
  }
  return status != cudaStreamCaptureStatusNone;
}

// The size of a launch: its rows, its blocks, and the elements of a block.
struct Extent {
  int rows;
  int64_t blocks;
  int chunk;
};

// Calls launch(arguments, buffer, extent) until all rows are covered. Usually one call is enough. Several are made in a
// capture with very many rows, and for rows with more blocks than a grid takes. If all rows are empty, there is no
// call. A launch finds its rows in `buffer`; if that is null, in `arguments`, which take at most kMostBytes.
template <int kMostBytes, class R, class Launch>
void launch_rows(std::vector<R> rows, c10::Device device, cudaStream_t stream, const Launch& launch) {
  constexpr int64_t few = Arguments<R, kFewBytes>::capacity, many = Arguments<R, kMostBytes>::capacity;
  constexpr int64_t kMaxBlocks = std::numeric_limits<int32_t>::max();  // the limit of a grid's x
  const int64_t chunk = chunk_size(rows);
  const auto extent = [&](int64_t count, int64_t blocks) {
    return Extent{static_cast<int>(count), blocks, static_cast<int>(chunk)};
  };
  // from_arguments and from_buffer call write(where), which writes the rows to `where` and returns the number of blocks
  // that the rows need. Then they launch that many blocks.
  const auto from_arguments = [&](auto arguments, int64_t count, const auto& write) {
    static_assert(std::is_trivially_copyable_v<decltype(arguments)> && sizeof(arguments) <= arguments.bytes);
    const int64_t blocks = write(arguments.rows);
    launch(arguments, static_cast<const R*>(nullptr), extent(count, blocks));
  };
  const auto from_buffer = [&](int64_t count, const auto& write) {
    const auto bytes = count * static_cast<int64_t>(sizeof(R));
    const auto options = at::TensorOptions().dtype(at::kByte);
    const at::Tensor host = at::empty({bytes}, options.device(at::kCPU).pinned_memory(true));
    const at::Tensor buffer = at::empty({bytes}, options.device(device));
    const int64_t blocks = write(static_cast<R*>(host.mutable_data_ptr()));
    buffer.copy_(host, /*non_blocking=*/true);
    launch(Arguments<R, kFewBytes>(), static_cast<const R*>(buffer.const_data_ptr()), extent(count, blocks));
  };

  const auto count = static_cast<int64_t>(rows.size());
  const int64_t most = driver_takes_large_arguments() ? many : few;
  const Metadata route = metadata.load();
  const bool fits = count <= most && route != Metadata::kBuffer;
  const bool buffered = !fits && route != Metadata::kArguments && !is_capturing(stream);
  const auto send = [&](int64_t part, const auto& write) {
    if (buffered) return from_buffer(part, write);
    if (part <= few) return from_arguments(Arguments<R, kFewBytes>(), part, write);
    from_arguments(Arguments<R, kMostBytes>(), part, write);
  };

  for_each_launch(std::move(rows), chunk, buffered ? count : most, kMaxBlocks, send);
}

}  // namespace amp_patch

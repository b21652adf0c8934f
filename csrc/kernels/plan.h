// The plan: from the sizes of tensors to launches of (tensor, chunk). Plain C++ without a device, so that test_plan.py
// runs it on any machine.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

namespace amp_patch {

struct Span {
  int64_t tensor;  // index into the lists
  int64_t first;   // its chunks [first, first + count); int64: sizes go past 2**31
  int64_t count;
};

// The launches that cover every chunk of every tensor once, in order: at most max_tensors spans each, of at most
// max_chunks chunks together. Chunk i of a tensor is its elements [i * chunk, min((i + 1) * chunk, size)). Empty
// tensors have no span. A tensor with more chunks than a launch has left goes on in the next one.
inline std::vector<std::vector<Span>> plan_spans(const std::vector<int64_t>& sizes, int64_t chunk, int64_t max_tensors,
                                                 int64_t max_chunks) {
  if (chunk < 1 || max_tensors < 1 || max_chunks < 1) {
    throw std::invalid_argument("plan: chunk, max_tensors and max_chunks must be positive");
  }
  std::vector<std::vector<Span>> launches;
  std::vector<Span> pending;
  int64_t room = max_chunks;
  const auto flush = [&] {
    launches.push_back(std::move(pending));
    pending.clear();
    room = max_chunks;
  };
  for (int64_t tensor = 0; tensor < static_cast<int64_t>(sizes.size()); ++tensor) {
    if (sizes[tensor] < 0) throw std::invalid_argument("plan: a size is negative");
    const int64_t count = sizes[tensor] / chunk + (sizes[tensor] % chunk != 0);
    for (int64_t first = 0; first < count;) {
      if (room == 0 || static_cast<int64_t>(pending.size()) == max_tensors) flush();
      const int64_t taken = std::min(room, count - first);
      pending.push_back({tensor, first, taken});
      room -= taken;
      first += taken;
    }
  }
  // After the loop: a last tensor without chunks must not drop the launch that is pending.
  if (!pending.empty()) flush();
  return launches;
}

struct Chunk {
  int64_t slot;   // the index in the launch's tensors
  int64_t index;  // the index of the chunk in the tensor
};

struct Launch {
  std::vector<int64_t> tensors;  // indices into the lists, at most max_tensors
  std::vector<Chunk> chunks;     // at most max_chunks
};

// plan_spans, chunk by chunk.
inline std::vector<Launch> plan(const std::vector<int64_t>& sizes, int64_t chunk, int64_t max_tensors,
                                int64_t max_chunks) {
  std::vector<Launch> launches;
  for (const std::vector<Span>& spans : plan_spans(sizes, chunk, max_tensors, max_chunks)) {
    Launch& launch = launches.emplace_back();
    for (const Span& span : spans) {
      const auto slot = static_cast<int64_t>(launch.tensors.size());
      launch.tensors.push_back(span.tensor);
      for (int64_t i = 0; i < span.count; ++i) launch.chunks.push_back({slot, span.first + i});
    }
  }
  return launches;
}

}  // namespace amp_patch

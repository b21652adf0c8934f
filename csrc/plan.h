// From lists of tensors to launches of (tensor, chunk). Plain C++, no device: tests/test_plan.py runs it everywhere.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

namespace amp_patch {

struct Chunk {
  int64_t slot;   // which of the launch's tensors
  int64_t index;  // elements [index * chunk, min((index + 1) * chunk, size)) of it; int64: sizes go past 2**31
};

struct Launch {
  std::vector<int64_t> tensors;  // indices into the lists, at most max_tensors
  std::vector<Chunk> chunks;     // at most max_chunks
};

// Covers every element of every tensor once, in order. Empty tensors take no slot. A tensor with more chunks than a
// launch has left goes on in the next one, where it takes a slot again.
inline std::vector<Launch> plan(const std::vector<int64_t>& sizes, int64_t chunk, int64_t max_tensors,
                                int64_t max_chunks) {
  if (chunk < 1 || max_tensors < 1 || max_chunks < 1) {
    throw std::invalid_argument("plan: chunk, max_tensors and max_chunks must be positive");
  }
  std::vector<Launch> launches;
  Launch pending;
  const auto flush = [&] {
    launches.push_back(std::move(pending));
    pending = Launch();
  };
  for (int64_t tensor = 0; tensor < static_cast<int64_t>(sizes.size()); ++tensor) {
    if (sizes[tensor] < 0) throw std::invalid_argument("plan: a size is negative");
    const int64_t count = sizes[tensor] / chunk + (sizes[tensor] % chunk != 0);
    for (int64_t index = 0; index < count; ++index) {
      if (static_cast<int64_t>(pending.chunks.size()) == max_chunks) flush();
      if (pending.tensors.empty() || pending.tensors.back() != tensor) {
        if (static_cast<int64_t>(pending.tensors.size()) == max_tensors) flush();
        pending.tensors.push_back(tensor);
      }
      pending.chunks.push_back({static_cast<int64_t>(pending.tensors.size()) - 1, index});
    }
  }
  // Outside the loop, so that the last tensor's size (0, say) decides nothing about what is still pending.
  if (!pending.chunks.empty()) flush();
  return launches;
}

}  // namespace amp_patch

// Shared by the CPU's loops: the division of lists of tensors among threads, and the choice of the instruction set.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "plan.h"

namespace amp_patch {

constexpr int64_t kChunk = 16384;       // elements of a chunk; another number changes the last bits of norms
constexpr int64_t kChunkOverhead = 64;  // the fixed cost of a chunk, as a number of elements

// The sets that this machine can run, the best one last: portable, avx2, avx512. In cpu.cpp.
const std::vector<std::string>& instruction_sets();
// The set in use.
size_t instruction_set();

// Prefetches the elements of a short tensor. In a long tensor the processor detects the pattern and prefetches by
// itself; a short tensor ends before that.
inline void prefetch_short(const void* data, int64_t bytes) {
  constexpr int64_t kLine = 64, kMost = 2048;
  if (bytes > kMost) return;
  for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(static_cast<const char*>(data) + at);
}

// The chunks into which tensors of the given sizes are divided. Threads share the work by elements and not by tensors,
// because a model has many tiny tensors and a few huge ones.
class CpuChunks {
 public:
  explicit CpuChunks(const std::vector<int64_t>& sizes) : sizes_(sizes) {
    constexpr int64_t unlimited = std::numeric_limits<int64_t>::max();
    const std::vector<std::vector<Span>> launches = plan_spans(sizes, kChunk, unlimited, unlimited);
    if (launches.empty()) return;
    for (const Span& span : launches[0]) {
      for (int64_t i = 0; i < span.count; ++i) chunks_.push_back({span.tensor, i});
    }
    starts_.reserve(chunks_.size());
    for (const Chunk& chunk : chunks_) {
      starts_.push_back(work_);
      work_ += kChunkOverhead + std::min(kChunk, sizes[chunk.slot] - chunk.index * kChunk);
    }
  }

  int64_t size() const { return static_cast<int64_t>(chunks_.size()); }
  int64_t slot(int64_t c) const { return chunks_[c].slot; }  // the tensor of chunk c

  // Calls visit(c, slot, begin, end) for each chunk c, elements [begin, end) of tensor `slot`; in several threads if
  // the work is more than `grain` elements. Calls prefetch(slot) some chunks before.
  template <class Prefetch, class Visit>
  void for_each(int64_t grain, const Prefetch& prefetch, const Visit& visit) const {
    at::parallel_for(0, work_, grain, [&](int64_t from, int64_t to) {
      for (auto c = std::lower_bound(starts_.begin(), starts_.end(), from) - starts_.begin();
           c < size() && starts_[c] < to; ++c) {
        constexpr int64_t kAhead = 3;
        if (c + kAhead < size()) prefetch(chunks_[c + kAhead].slot);
        const int64_t begin = chunks_[c].index * kChunk;
        visit(c, chunks_[c].slot, begin, std::min(begin + kChunk, sizes_[chunks_[c].slot]));
      }
    });
  }

 private:
  const std::vector<int64_t>& sizes_;
  std::vector<int64_t> starts_;
  std::vector<Chunk> chunks_;
  int64_t work_ = 0;
};

}  // namespace amp_patch

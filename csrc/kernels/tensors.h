// The lists that Python hands over.
#pragma once

#include <ATen/ATen.h>

#include <cstring>
#include <vector>

namespace amp_patch {

// A list of tensors that the caller owns and keeps alive: reference counts do not change. A tensor's metadata (its
// TensorImpl), its storage and its version counter are scattered over the memory, and for a small tensor waiting for
// them costs more than all other work. So loops prefetch them.
class Tensors {
 public:
  Tensors() = default;
  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;
  ~Tensors() {
    for (at::Tensor& t : items_) Borrowed::destroyBorrow(t);
  }

  void reserve(size_t n) { items_.reserve(n); }
  void push_back(const at::Tensor& t) { items_.push_back(Borrowed::createBorrow(t)); }
  size_t size() const { return items_.size(); }
  bool empty() const { return items_.empty(); }
  const at::Tensor& operator[](size_t i) const { return items_[i]; }

  // Prefetches the metadata of tensor i.
  void prefetch(size_t i) const {
    if (i < items_.size()) prefetch_object<c10::TensorImpl>(items_[i].unsafeGetTensorImpl());
  }

  // Prefetches the version counters of tensors behind tensor i. A loop that bumps versions calls it in iteration i.
  void prefetch_versions(size_t i) const {
    static_assert(sizeof(c10::VariableVersion) == sizeof(void*), "a pointer to the counter");
    if (i + 2 * kStage < items_.size()) {
      __builtin_prefetch(&items_[i + 2 * kStage].unsafeGetTensorImpl()->version_counter());
    }
    if (i + kStage >= items_.size()) return;
    const void* counter = nullptr;
    std::memcpy(&counter, &items_[i + kStage].unsafeGetTensorImpl()->version_counter(), sizeof(counter));
    __builtin_prefetch(counter);
  }

 private:
  using Borrowed = c10::MaybeOwnedTraits<at::Tensor>;
  static constexpr size_t kStage = 4;  // turns ahead

  template <class Object>
  static void prefetch_object(const void* object) {
    for (size_t at = 0; at < sizeof(Object); at += 64) __builtin_prefetch(static_cast<const char*>(object) + at);
  }

  std::vector<at::Tensor> items_;
};

}  // namespace amp_patch

// The logits of a loss: what its backward reads, and the place in autograd's graph where it returns a gradient.
// amp_patch/casts/sources.py finds the nodes between logits and a cast, and says when a gradient may go around them.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

namespace amp_patch {
namespace {

using at::Tensor;
namespace impl = torch::autograd::impl;

// ---------------------------------------------------------------------------------------------------------------------
// The last casts to FP32 of this thread

// A cast on a CPU. Both tensors are referenced weakly: without other references, their memory is freed.
struct Cast {
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> wide;
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl>> low;
  uint32_t version = 0;  // of the low tensor
};

thread_local std::array<Cast, 8> casts;
thread_local size_t newest = 0;

// The kernel of `_to_copy` at a key below autograd, at which torch has none for it.
Tensor to_copy(c10::DispatchKeySet keys, const Tensor& self, std::optional<at::ScalarType> dtype,
               std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pinned,
               bool non_blocking, std::optional<at::MemoryFormat> format) {
  constexpr c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::ADInplaceOrView);
  Tensor wide = at::_ops::_to_copy::redispatch(keys & below, self, dtype, layout, device, pinned, non_blocking, format);
  const auto type = self.scalar_type();
  constexpr c10::DispatchKeySet stand_ins({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                           c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched});
  const auto both = self.key_set() | wide.key_set();
  if (dtype != at::kFloat || (type != at::kHalf && type != at::kBFloat16) || both.has_any(stand_ins) ||
      !self.key_set().has(c10::DispatchKey::CPU) || !wide.is_cpu() || !self.has_storage() || !wide.has_storage() ||
      self.is_inference() || self.strides() != wide.strides()) {
    return wide;
  }
  newest = (newest + 1) % casts.size();
  casts[newest] = Cast{wide.storage().getWeakStorageImpl(),
                       c10::weak_intrusive_ptr<c10::TensorImpl>(self.getIntrusivePtr()), uint32_t(self._version())};
  return wide;
}

// Once, when the extension is loaded: torch's dispatcher fails in threads that call an operator while a kernel of it is
// registered.
TORCH_LIBRARY_IMPL(aten, ADInplaceOrView, library) { library.impl("_to_copy", TORCH_FN(to_copy)); }

// ---------------------------------------------------------------------------------------------------------------------

// A tensor of its own in the memory of `of`, with its counter of writes, and not in autograd's graph.
Tensor alias(const Tensor& of, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Tensor result = of.as_strided(sizes, strides, offset);
  impl::set_version_counter(result, impl::version_counter(of));
  return result;
}

class Logits {
 public:
  // Before `logits` were `views` operations with a node each, of one input, and then a cast; -1: there was no cast.
  Logits(const Tensor& logits, int64_t views) : edge_(impl::gradient_edge(logits)) {
    for (auto* node = edge_.function.get(); views >= 0; --views, node = node->next_edge(0).function.get())
      nodes_.push_back(node);
  }

  // A tensor at the place of the cast's operand, of its shape and type, with one element of memory.
  Tensor place() const {
    const auto edge = nodes_.back()->next_edge(0);
    const auto& like = edge.function->input_metadata(edge.input_nr);
    auto result = at::empty({}, like.options()).expand_symint(like.shape_as_dim_vector());
    impl::set_gradient_edge(result, edge);
    return result;
  }

  // `values` at the place of the logits.
  Tensor attached(const Tensor& values) const {
    Tensor result = values.detach();
    impl::set_gradient_edge(result, edge_);
    return result;
  }

  // Whether in the backward that runs on this thread no other code sees a gradient of the FP32 tensors, or adds to it:
  // no hook, no other function of them, no request for single gradients.
  bool is_alone() const {
    const auto* asked = torch::autograd::get_current_graph_task_exec_info();
    if (asked == nullptr || !asked->empty()) return false;
    for (auto* node : nodes_) {
      if (!node->tensor_pre_hooks().empty() || !node->retains_grad_hooks().empty() || !node->pre_hooks().empty() ||
          !node->post_hooks().empty()) {
        return false;
      }
    }
    size_t uses = 0;
    for (const auto* node : *torch::autograd::get_current_graph_task_nodes_in_graph()) {
      for (const auto& edge : node->next_edges()) {
        uses += std::count(nodes_.begin(), nodes_.end(), edge.function.get());
      }
    }
    return uses <= nodes_.size();  // one of each; that of the loss is not counted if the loss is the graph's root
  }

 private:
  torch::autograd::Edge edge_;                 // owns the nodes
  std::vector<torch::autograd::Node*> nodes_;  // from the logits' to the cast's
};

// What a loss saves of its logits. Its memory is freed, or may be written, when nothing else has it.
Tensor saved(const Tensor& logits) { return alias(logits, logits.sizes(), logits.strides(), logits.storage_offset()); }

// The low-precision tensor in the shape of its FP32 copy `wide`, if it is alive and was not written since the cast.
std::optional<Tensor> low_of(const Tensor& wide) {
  for (const Cast& cast : casts) {
    if (!cast.wide.has_value()) continue;
    const auto storage = cast.wide->lock();
    if (storage.get() != wide.storage().unsafeGetStorageImpl()) continue;
    const Tensor low(cast.low->lock());
    if (!low.defined() || low._version() != cast.version || size_t(low.numel()) * sizeof(float) != storage->nbytes())
      return {};
    return alias(low, wide.sizes(), wide.strides(), low.storage_offset() + wide.storage_offset());
  }
  return {};
}

// Whether the memory of `saved`, which has come from `saved()`, is of no use after this call of a backward.
bool is_private(const Tensor& saved) {
  const auto& storage = saved.storage();
  return saved.is_cpu() && !torch::autograd::get_current_graph_task_keep_graph() && storage.use_count() == 1 &&
         storage.resizable() && storage.allocator() == c10::GetAllocator(c10::kCPU) &&
         saved.is_non_overlapping_and_dense();
}

}  // namespace

void bind_upcasts(py::module_& m) {
  py::class_<Logits>(m, "Logits")
      .def(py::init<const Tensor&, int64_t>())
      .def("place", &Logits::place)
      .def("attached", &Logits::attached)
      .def("is_alone", &Logits::is_alone)
      .def_static("saved", &saved)
      .def_static("low_of", &low_of)
      .def_static("is_private", &is_private);
}

}  // namespace amp_patch

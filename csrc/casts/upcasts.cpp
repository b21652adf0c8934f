// FP32 logits of a loss that were cast from low precision: what its backward reads, and where it returns a gradient.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace amp_patch {
namespace {

using at::Tensor;
using torch::autograd::GraphTask;
using torch::autograd::Node;
namespace impl = torch::autograd::impl;

// ---------------------------------------------------------------------------------------------------------------------
// The last casts to FP32 of this thread

bool is_low(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16; }

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
  constexpr c10::DispatchKeySet stand_ins({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                           c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched});
  const auto both = self.key_set() | wide.key_set();
  if (dtype != at::kFloat || !is_low(self.scalar_type()) || both.has_any(stand_ins) ||
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

// The backward that runs on this thread; null if none does.
GraphTask* current_task() {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
  constexpr size_t offset = offsetof(GraphTask, exec_info_);
#pragma GCC diagnostic pop
  const auto* field = torch::autograd::get_current_graph_task_exec_info();  // torch gives out this field alone
  return field == nullptr ? nullptr : reinterpret_cast<GraphTask*>(reinterpret_cast<uintptr_t>(field) - offset);
}

// FP32 logits, and autograd's nodes from them back to a cast from low precision; without nodes if there is none.
class Upcast {
 public:
  explicit Upcast(const Tensor& logits) : edge_(impl::gradient_edge(logits)) {
    // The functions between that keep the elements, so that their backward takes a gradient of any type.
    static const std::unordered_set<std::string> views{
        "AliasBackward0",     "CloneBackward0",      "PermuteBackward0", "ReshapeAliasBackward0",
        "SelectBackward0",    "SliceBackward0",      "TBackward0",       "TransposeBackward0",
        "UnsqueezeBackward0", "UnsafeViewBackward0", "ViewBackward0"};
    Node* node = edge_.function.get();
    for (; node != nullptr && views.count(node->name()) > 0; node = node->next_edge(0).function.get()) {
      nodes_.push_back(node);
    }
    bool is_cast = node != nullptr && node->name() == "ToCopyBackward0";
    if (is_cast) {
      const auto edge = node->next_edge(0);
      const auto options = edge.function->input_metadata(edge.input_nr).options();
      is_cast = is_low(at::typeMetaToScalarType(options.dtype())) && options.device() == logits.device();
    }
    is_cast ? nodes_.push_back(node) : nodes_.clear();
  }

  // A tensor at the place of the cast's operand, of its shape and type, with one element of memory.
  std::optional<Tensor> place() const {
    if (nodes_.empty()) return {};
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

  // Whether in this backward no other code sees a gradient of the FP32 tensors, or adds to it: no hook, no other
  // function of them, no other root, no request for single gradients.
  bool is_alone() const {
    GraphTask* task = current_task();
    if (task == nullptr || !task->exec_info_.empty()) return false;
    const std::lock_guard<std::mutex> lock(task->mutex_);
    return std::all_of(nodes_.begin(), nodes_.end(), [&](Node* node) {
      const auto awaited = task->dependencies_.find(node);
      return awaited != task->dependencies_.end() && awaited->second == 1 && task->not_ready_.count(node) == 0 &&
             node->tensor_pre_hooks().empty() && node->retains_grad_hooks().empty() && node->pre_hooks().empty() &&
             node->post_hooks().empty();
    });
  }

  // The gradient of `place()` for `gradient`, that of the logits in its type.
  Tensor through(Tensor gradient) const {
    for (size_t i = 0; i + 1 < nodes_.size(); ++i) gradient = (*nodes_[i])({std::move(gradient)})[0];
    return gradient;
  }

 private:
  torch::autograd::Edge edge_;  // owns the nodes
  std::vector<Node*> nodes_;    // from the logits' to the cast's
};

// The low-precision tensor in the shape of its FP32 copy `wide`, if it is alive and was not written since the cast.
std::optional<Tensor> low_of(const Tensor& wide) {
  for (const Cast& cast : casts) {
    if (!cast.wide.has_value()) continue;
    const auto storage = cast.wide->lock();
    if (storage.get() != wide.storage().unsafeGetStorageImpl()) continue;
    const Tensor low(cast.low->lock());
    if (!low.defined() || low._version() != cast.version || size_t(low.numel()) * sizeof(float) != storage->nbytes() ||
        size_t(low.storage_offset() + low.numel()) * low.itemsize() > low.storage().nbytes()) {
      return {};
    }
    return alias(low, wide.sizes(), wide.strides(), low.storage_offset() + wide.storage_offset());
  }
  return {};
}

// Whether nobody can read the memory of `saved`, as autograd has unpacked it from a hook's tensor, after this backward.
bool is_private(const Tensor& saved) {
  const auto& storage = saved.storage();
  return saved.is_cpu() && !torch::autograd::get_current_graph_task_keep_graph() && storage.use_count() == 2 &&
         storage.resizable() && storage.allocator() == c10::GetAllocator(c10::kCPU) &&
         saved.is_non_overlapping_and_dense();
}

}  // namespace

void bind_upcasts(py::module_& m) {
  py::class_<Upcast>(m, "Upcast")
      .def(py::init<const Tensor&>())
      .def("place", &Upcast::place)
      .def("attached", &Upcast::attached)
      .def("is_alone", &Upcast::is_alone)
      .def("through", &Upcast::through)
      .def_static("low_of", &low_of)
      .def_static("is_private", &is_private);
}

}  // namespace amp_patch

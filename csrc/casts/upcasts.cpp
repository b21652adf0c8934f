// The place in autograd's graph of a low-precision tensor that was cast to FP32, found from the FP32 tensor.
// amp_patch/casts/sources.py finds the nodes between both, and says when a gradient may go around them.
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

namespace amp_patch {
namespace {

class Upcast {
 public:
  // `wide` is the FP32 tensor, or was made of it by operations with a node each, of one input: `views` of them.
  Upcast(const at::Tensor& wide, int64_t views) : last_(wide.grad_fn()) {
    for (auto* node = last_.get(); views >= 0; --views, node = node->next_edge(0).function.get())
      nodes_.push_back(node);
  }

  // A tensor at the place of the low-precision one, of its shape and type, with one element of memory.
  at::Tensor place() const {
    const auto edge = nodes_.back()->next_edge(0);
    const auto& like = edge.function->input_metadata(edge.input_nr);
    auto result = at::empty({}, like.options()).expand_symint(like.shape_as_dim_vector());
    torch::autograd::impl::set_gradient_edge(result, edge);
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
  std::decay_t<decltype(std::declval<at::Tensor>().grad_fn())> last_;  // owns the nodes behind it
  std::vector<torch::autograd::Node*> nodes_;                          // from `last_` to the cast
};

}  // namespace

void bind_upcasts(py::module_& m) {
  py::class_<Upcast>(m, "Upcast")
      .def(py::init<const at::Tensor&, int64_t>())
      .def("place", &Upcast::place)
      .def("is_alone", &Upcast::is_alone);
}

}  // namespace amp_patch

// Finds the tensors that were written since their version counters were last noted. That runs before every forward of a
// model with masters, so it takes nanoseconds a tensor. masters/masters.py has both classes in Python, for where there
// is no extension.
#include <torch/extension.h>

#include <memory>
#include <utility>
#include <vector>

namespace amp_patch {
namespace {

// A tensor, and its version counter when that was last noted.
class Noted {
 public:
  explicit Noted(at::Tensor tensor) : tensor_(std::move(tensor)) { note(); }
  bool written() const { return version() != noted_; }
  void note() { noted_ = version(); }

 private:
  uint32_t version() const {
    const c10::VariableVersion& counter = tensor_.unsafeGetTensorImpl()->version_counter();
    return counter.enabled() ? counter.current_version() : 0;  // inference tensors have none
  }

  at::Tensor tensor_;
  uint32_t noted_ = 0;
};

// Several of them, compared in one call.
class Watch {
 public:
  explicit Watch(std::vector<std::shared_ptr<Noted>> noted) : noted_(std::move(noted)) {}

  std::vector<size_t> written() const {
    std::vector<size_t> indices;
    for (size_t i = 0; i < noted_.size(); ++i) {
      if (noted_[i]->written()) indices.push_back(i);
    }
    return indices;
  }

  void note() {
    for (const auto& noted : noted_) noted->note();
  }

 private:
  std::vector<std::shared_ptr<Noted>> noted_;
};

}  // namespace

void bind_versions(py::module_& m) {
  py::class_<Noted, std::shared_ptr<Noted>>(m, "Noted")
      .def(py::init<at::Tensor>())
      .def("written", &Noted::written)
      .def("note", &Noted::note);
  py::class_<Watch>(m, "Watch")
      .def(py::init<std::vector<std::shared_ptr<Noted>>>())
      .def("written", &Watch::written)
      .def("note", &Watch::note);
}

}  // namespace amp_patch

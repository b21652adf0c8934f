// Finds the tensors that were written since their version counters were last saved. The search runs before every
// forward of a model with masters, so it takes nanoseconds per tensor. masters/masters.py has both classes in Python,
// for processes without the extension.
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>
#include <vector>

namespace amp_patch {
namespace {

// A tensor, and its version counter at the last save.
class SavedVersion {
 public:
  explicit SavedVersion(at::Tensor tensor) : tensor_(std::move(tensor)) { save(); }
  bool written() const { return version() != saved_; }
  void save() { saved_ = version(); }

 private:
  uint32_t version() const {
    const c10::VariableVersion& counter = tensor_.unsafeGetTensorImpl()->version_counter();
    return counter.enabled() ? counter.current_version() : 0;  // inference tensors have none
  }

  at::Tensor tensor_;
  uint32_t saved_ = 0;
};

// Several saved versions, compared in one call.
class SavedVersions {
 public:
  explicit SavedVersions(std::vector<std::shared_ptr<SavedVersion>> versions) : versions_(std::move(versions)) {}

  std::vector<size_t> written() const {
    std::vector<size_t> indices;
    for (size_t i = 0; i < versions_.size(); ++i) {
      if (versions_[i]->written()) indices.push_back(i);
    }
    return indices;
  }

  void save() {
    for (const auto& version : versions_) version->save();
  }

 private:
  std::vector<std::shared_ptr<SavedVersion>> versions_;
};

}  // namespace

void bind_versions(py::module_& m) {
  py::class_<SavedVersion, std::shared_ptr<SavedVersion>>(m, "SavedVersion")
      .def(py::init<at::Tensor>())
      .def("written", &SavedVersion::written)
      .def("save", &SavedVersion::save);
  py::class_<SavedVersions>(m, "SavedVersions")
      .def(py::init<std::vector<std::shared_ptr<SavedVersion>>>())
      .def("written", &SavedVersions::written)
      .def("save", &SavedVersions::save);
}

}  // namespace amp_patch

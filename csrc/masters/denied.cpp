// Makes reads of freed memory throw. Torch's kernels take a tensor's shape and pointer and do not check its storage: if
// that is empty, they read address 0, and the process crashes.
#include <torch/csrc/utils/pybind.h>

#include <string>

namespace amp_patch {
namespace {

// Makes every later access to the memory of `tensor` throw this message.
void deny_memory(const at::Tensor& tensor, const std::string& message) {
  tensor.storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

}  // namespace

void bind_denied(py::module_& m) { m.def("deny_memory", &deny_memory); }

}  // namespace amp_patch

// Memory that is gone refuses to be read. Torch's kernels ask a tensor for its shape and its pointer, and not whether
// there is memory behind that: of a tensor whose storage is empty they read address 0.
#include <torch/extension.h>

#include <string>

namespace amp_patch {
namespace {

// Let every access to the memory of `tensor` throw from now on, for good, with this message.
void deny_memory(const at::Tensor& tensor, const std::string& message) {
  tensor.storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

}  // namespace

void bind_denied(py::module_& m) { m.def("deny_memory", &deny_memory); }

}  // namespace amp_patch

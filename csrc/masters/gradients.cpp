// Reads and clears the gradients of many parameters in one call: in Python each attribute access costs 50 ns.
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace amp_patch {
namespace {

const at::Tensor& unpacked(PyObject* list, Py_ssize_t i) {
  PyObject* const item = PyList_GET_ITEM(list, i);
  TORCH_CHECK_TYPE(THPVariable_Check(item), "item ", i, " is a ", Py_TYPE(item)->tp_name, ", a tensor is wanted");
  return THPVariable_Unpack(item);
}

const at::Tensor& grad_of(const at::Tensor& t) {
  const c10::TensorImpl& impl = *t.unsafeGetTensorImpl();
  return impl.grad();
}

bool is_plain(const at::Tensor& t) {
  return t.layout() == at::kStrided && !t.key_set().has(c10::DispatchKey::Python) && !t.is_neg() && !t.is_conj() &&
         !t.is_inference() && t.has_storage() && t.is_non_overlapping_and_dense();
}

bool alike(const at::Tensor& a, const at::Tensor& b) { return a.sizes() == b.sizes() && a.strides() == b.strides(); }

// The reference counts of a tensor and of its Python object, after a conversion to Python.
struct Holders {
  Holders(const at::Tensor& t, PyObject* object)
      : of_tensor(static_cast<int64_t>(t.use_count())), of_object(static_cast<int64_t>(Py_REFCNT(object))) {}
  int64_t of_tensor, of_object;
};

// The reference counts of a tensor that only one C++ variable references. They are measured, because torch's releases
// differ in which side keeps the Python object alive.
const Holders& lone_holders() {
  static const Holders holders = [] {
    const c10::impl::ExcludeDispatchKeyGuard without_python(
        c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));  // a mode may keep it
    const at::Tensor t = at::zeros({});
    const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(t));
    return Holders(t, object.ptr());
  }();
  return holders;
}

bool is_held_by_others(const at::Tensor& t, PyObject* object) {
  const Holders now(t, object), &alone = lone_holders();
  return now.of_tensor > alone.of_tensor || now.of_object > alone.of_object || t.storage().use_count() != 1;
}

// Tells whether a low-precision gradient may be deferred, as the master's gradient: it has the memory layout of
// parameter and master, and the master has no gradient.
bool may_stand(const at::Tensor& param, const at::Tensor& grad, const at::Tensor& master, c10::Device device) {
  return (grad.scalar_type() == at::kHalf || grad.scalar_type() == at::kBFloat16) && grad.device() == device &&
         master.device() == device && is_plain(grad) && is_plain(master) && !grad.requires_grad() && !grad.is_view() &&
         alike(grad, param) && alike(grad, master) && master.scalar_type() == at::kFloat &&
         master.requires_grad() == param.requires_grad() && !grad_of(master).defined();
}

// Removes the gradients of `params` (list of tensors) and returns {id(master): gradient}, in their order; `masters` has
// the master of each. Returns None, with nothing changed, if a gradient may not be deferred (may_stand), or if other
// code references it: that code could write the gradient, or see it change.
py::object take_half_gradients(const py::list& params, const py::list& masters) {
  const Py_ssize_t n = PyList_GET_SIZE(params.ptr());
  TORCH_CHECK_VALUE(PyList_GET_SIZE(masters.ptr()) == n, "take_half_gradients: lists of different lengths");
  c10::optional<c10::Device> device;
  for (Py_ssize_t i = 0; i < n; ++i) {
    const at::Tensor &param = unpacked(params.ptr(), i), &master = unpacked(masters.ptr(), i), &grad = grad_of(param);
    if (!grad.defined()) continue;
    if (!device.has_value()) device = grad.device();
    if (!may_stand(param, grad, master, *device)) return py::none();
  }
  py::dict taken;
  for (Py_ssize_t i = 0; i < n; ++i) {
    const at::Tensor& param = unpacked(params.ptr(), i);
    if (!grad_of(param).defined()) continue;
    const auto grad = py::reinterpret_steal<py::object>(THPVariable_Wrap(grad_of(param)));
    if (is_held_by_others(grad_of(param), grad.ptr())) return py::none();
    taken[py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(PyList_GET_ITEM(masters.ptr(), i)))] = grad;
  }
  for (Py_ssize_t i = 0; i < n; ++i) unpacked(params.ptr(), i).mutable_grad() = at::Tensor();
  return taken;
}

// The indices of the tensors that have a gradient.
std::vector<Py_ssize_t> with_gradient(const py::list& tensors) {
  std::vector<Py_ssize_t> indices;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors.ptr()); ++i) {
    if (grad_of(unpacked(tensors.ptr(), i)).defined()) indices.push_back(i);
  }
  return indices;
}

// The gradients of the parameters that have one; None if one is sparse, complex or on another device.
py::object plain_gradients(const py::list& params) {
  py::list grads;
  c10::optional<c10::Device> device;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params.ptr()); ++i) {
    const at::Tensor& grad = grad_of(unpacked(params.ptr(), i));
    if (!grad.defined()) continue;
    if (!device.has_value()) device = grad.device();
    if (!is_plain(grad) || grad.device() != *device || grad.is_complex() || grad.requires_grad()) return py::none();
    grads.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(grad)));
  }
  return grads;
}

// Sets the gradients of the tensors to None.
void drop_gradients(const py::list& tensors) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors.ptr()); ++i) {
    const at::Tensor& t = unpacked(tensors.ptr(), i);
    if (grad_of(t).defined()) t.mutable_grad() = at::Tensor();
  }
}

}  // namespace

void bind_gradients(py::module_& m) {
  lone_holders();
  m.def("take_half_gradients", &take_half_gradients);  // params, masters -> {id(master): gradient} or None
  m.def("with_gradient", &with_gradient);              // tensors -> indices
  m.def("plain_gradients", &plain_gradients);          // params -> gradients or None
  m.def("drop_gradients", &drop_gradients);            // tensors
}

}  // namespace amp_patch

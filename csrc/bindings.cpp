// amp_patch._C: all names that Python sees, except the submodule `casts` (casts/wrapper.cpp). The functions of the same
// names in amp_patch.multi_tensor document the kernels.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "kernels/cpu_features.h"
#include "kernels/ops.h"
#include "kernels/plan.h"
#include "kernels/step_ops.h"

namespace pybind11::detail {

// A list or tuple of tensors, as pointers into the Python objects. It references the objects, because the call runs
// without the GIL. pybind11's own conversion to std::vector<at::Tensor> would cost as much as a kernel over a thousand
// small tensors.
template <>
struct type_caster<amp_patch::Tensors> {
  PYBIND11_TYPE_CASTER(amp_patch::Tensors, const_name("list[Tensor]"));

  ~type_caster() {
    for (PyObject* item : held_) Py_DECREF(item);
  }

  bool load(handle source, bool) {
    if (!PyList_Check(source.ptr()) && !PyTuple_Check(source.ptr())) return false;
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(source.ptr());
    PyObject** const items = PySequence_Fast_ITEMS(source.ptr());
    value.reserve(n);
    held_.reserve(n);
    for (Py_ssize_t i = 0; i < n; ++i) {
      if (!THPVariable_Check(items[i])) return false;
      value.push_back(THPVariable_Unpack(items[i]));
      Py_INCREF(items[i]);
      held_.push_back(items[i]);
    }
    return true;
  }

 private:
  std::vector<PyObject*> held_;
};

}  // namespace pybind11::detail

namespace amp_patch {

void bind_casts(py::module_& m);      // casts/wrapper.cpp
void bind_gradients(py::module_& m);  // masters/gradients.cpp
void bind_versions(py::module_& m);   // masters/versions.cpp
void bind_denied(py::module_& m);     // masters/denied.cpp
void bind_upcasts(py::module_& m);    // casts/upcasts.cpp

// kernels/cpu.cpp
struct CpuLoop;
extern template struct Ops<CpuLoop>;
const std::vector<std::string>& instruction_sets();
std::string use_instruction_set(const std::string& name);
at::Tensor layer_norm_sums(const at::Tensor& grads, const at::Tensor& inputs, const at::Tensor& means,
                           const at::Tensor& deviations, int64_t n);
// kernels/steps_cpu.cpp
struct CpuSteps;
extern template struct Steps<CpuSteps>;
// kernels/cuda.cu, kernels/steps_cuda.cu
#ifdef WITH_CUDA
struct CudaLoop;
extern template struct Ops<CudaLoop>;
struct CudaSteps;
extern template struct Steps<CudaSteps>;
void choose_metadata(const std::string& route);
#define ON_CUDA(op) &Ops<CudaLoop>::op
#define STEP_ON_CUDA(op) &Steps<CudaSteps>::op
#define DEVICES "cpu", "cuda"
#else
#define ON_CUDA(op) decltype (&Ops<CpuLoop>::op)(nullptr)
#define STEP_ON_CUDA(op) decltype (&Steps<CpuSteps>::op)(nullptr)
#define DEVICES "cpu"
#endif

inline bool is_cuda(const at::Tensor& t) { return t.is_cuda(); }
inline bool is_cuda(const Tensors& list) { return !list.empty() && list[0].is_cuda(); }
inline bool is_cuda(const MaybeTensor& t) { return t.has_value() && t->defined() && t->is_cuda(); }
template <class Setting>
bool is_cuda(const Setting&) {
  return false;
}

// One function for both devices: the CUDA op if any argument is a CUDA tensor. found_inf counts as an argument, because
// the lists may be empty.
template <class Return, class First, class... Rest>
auto on_device(Return (*cpu)(First, Rest...), Return (*cuda)(First, Rest...)) {
  return [cpu, cuda](First first, Rest... rest) -> Return {
    return (cuda != nullptr && (is_cuda(first) || ... || is_cuda(rest)) ? cuda : cpu)(first, rest...);
  };
}

#define OP(op) #op, on_device(&Ops<CpuLoop>::op, ON_CUDA(op)), py::call_guard<py::gil_scoped_release>()
#define STEP(op) #op, on_device(&Steps<CpuSteps>::op, STEP_ON_CUDA(op)), py::call_guard<py::gil_scoped_release>()

std::vector<std::pair<std::vector<int64_t>, std::vector<std::pair<int64_t, int64_t>>>> plan_as_lists(
    const std::vector<int64_t>& sizes, int64_t chunk, int64_t max_tensors, int64_t max_chunks) {
  std::vector<std::pair<std::vector<int64_t>, std::vector<std::pair<int64_t, int64_t>>>> launches;
  for (const Launch& launch : plan(sizes, chunk, max_tensors, max_chunks)) {
    launches.emplace_back(launch.tensors, std::vector<std::pair<int64_t, int64_t>>());
    for (const Chunk& c : launch.chunks) launches.back().second.emplace_back(c.slot, c.index);
  }
  return launches;
}

}  // namespace amp_patch

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace amp_patch;
  // Local, because with two builds in a process the translator registered last would raise its class for both builds.
  py::register_local_exception<Refused>(m, "Refused", PyExc_ValueError);
  m.attr("devices") = py::make_tuple(DEVICES);

  m.def(OP(scale));           // src, dst, factor, found_inf
  m.def(OP(unscale));         // grads, inv_scale, found_inf
  m.def(OP(axpby));           // x, y, out, a, b, found_inf, watch_x, watch_y
  m.def(OP(check_finite));    // tensors, found_inf, factor
  m.def(OP(l2norm));          // tensors, factor, found_inf -> [total, norms]
  m.def(OP(unscale_l2norm));  // grads, inv_scale, found_inf -> [total, norms]
  m.def(OP(adopt));           // params, masters
  m.def(OP(update_scale));    // scale, growth_tracker, found_inf, growth_factor, ..., hysteresis_tracker

  m.def(STEP(adam));              // lists, lr, step, factors, found_inf, numbers, flags: as Steps::adam in step_ops.h
  m.def(STEP(sgd));               // as Steps::sgd
  m.def(STEP(split));             // masters, weights, halves
  m.def(STEP(join));              // weights, halves, masters
  m.def(STEP(stochastic_round));  // masters, weights, seed, draws
  m.def(STEP(encode));            // values, codes, scales
  m.def(STEP(decode));            // codes, values, scales

  m.def("layer_norm_sums", &layer_norm_sums, py::call_guard<py::gil_scoped_release>());  // -> gradients [2, n] in FP32

  m.def("cpu_has", &cpu_has);  // float16 or bfloat16 -> whether this CPU has arithmetic of the type

  // For tests: which instruction set the CPU's loop uses, and which instruction sets this machine has.
  m.def("instruction_sets", &instruction_sets);
  m.def("use_instruction_set", &use_instruction_set);  // name -> the one before

  bind_gradients(m);
  bind_versions(m);
  bind_denied(m);
  bind_upcasts(m);

  auto casts = m.def_submodule("casts", "The wrapper of torch's functions at O1, and the policy whose casts act.");
  bind_casts(casts);

  m.def("plan", &plan_as_lists);  // sizes, chunk, max_tensors, max_chunks -> [(tensors, [(slot, index)])]
#ifdef WITH_CUDA
  m.def("cuda_metadata", &choose_metadata);  // "auto", "arguments" or "buffer": the way rows get to the kernels
#endif
}

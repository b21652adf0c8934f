// Whose casts act on this thread, and the cast weights that it remembers: what amp_patch/casts/ keeps in Python in its
// class `PythonState`, here as plain C++ values, so that a patched function reads it without a call into Python. The
// lowest of three files: rules.h stands on it, and wrapper.cpp on both.
//
// Everything here runs under the GIL; only a cast of a large tensor lets it go. Two things may run other Python code
// meanwhile: a cast (it may let the GIL go, and dispatch modes are Python) and the death of an object. So no iterator
// into a table and no reference to an entry is held across either of them.
#pragma once

#include <torch/csrc/python_headers.h>
// Python's own header stays in front: the next ones need it.
#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

namespace amp_patch {
namespace [[gnu::visibility("hidden")]] casts {  // as pybind11's namespace is, whose objects are members here

using at::ScalarType;

inline bool is_low(ScalarType type) { return type == ScalarType::Half || type == ScalarType::BFloat16; }
inline bool is_narrow(ScalarType type) { return is_low(type) || type == ScalarType::Float; }

inline bool is_tensor(PyObject* object) {
  if (THPVariable_CheckExact(object)) return true;
  PyTypeObject* const type = Py_TYPE(object);
  return (type->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0 &&  // the types of None, numbers and strings are no heap types
         PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

// A new reference as an object that owns it; throws the Python exception that null stands for.
inline py::object owned(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// ---------------------------------------------------------------------------------------------------------------------
// Whose casts act here and now

// The fields of a policy (amp_patch/policy.py) that a call reads, as plain values.
struct Acting {
  bool on = false;              // there is a policy, which casts by the op lists
  bool apex = false;            // its op lists are Apex's
  bool low_norms = false;       // norms give their input's type: the Python wrappers do that
  bool low_bit = false;         // products are FP8's or FP4's: the Python wrappers do that
  bool allows_banned = false;   // binary cross entropy runs in FP32, and so do sigmoids
  bool products_alone = false;  // and nothing else is cast
  ScalarType low = ScalarType::Half;
};

inline Acting acting_of(const py::object& policy) {
  Acting acting;
  if (!policy.is_none()) {
    acting.on = true;
    acting.apex = py::cast<std::string>(py::getattr(policy, "op_lists", py::str("torch"))) == "apex";
    acting.low_norms = py::cast<bool>(py::getattr(policy, "low_precision_norms", py::bool_(false)));
    acting.allows_banned = py::cast<bool>(py::getattr(policy, "allow_banned", py::bool_(false)));
    acting.low_bit = !py::getattr(policy, "product_format", py::none()).is_none();
    acting.products_alone = acting.low_bit && !py::cast<bool>(policy.attr("patch_torch_functions"));
    acting.low = py::cast<ScalarType>(policy.attr("dtype"));
  }
  return acting;
}

// The policy of a region, or of the process default.
struct Followed {
  py::object policy = py::none();
  Acting acting;      // its plain values
  int emulated = -1;  // the type whose products are emulated (emulation.cpp), as a number; -1 for none
  int depth = 0;      // in how many torch.autocast regions the thread was when this began
  int task = -1;      // in which pass of autograd it was then; -1 for none
};

inline Followed follow_policy(const py::object& policy, const py::object& emulated, int depth = 0, int task = -1) {
  const int type = emulated.is_none() ? -1 : int(py::cast<ScalarType>(emulated));
  return {policy, acting_of(policy), type, depth, task};
}

// In how many torch.autocast regions this thread is. Torch tells the number only to one who changes it.
inline int native_depth() {
  at::autocast::increment_nesting();
  return at::autocast::decrement_nesting();
}

// The device types whose torch.autocast is on, by the dispatcher's names for their casts.
inline c10::DispatchKeySet native_on() {
  return c10::autocast_dispatch_keyset - c10::impl::tls_local_dispatch_key_set().excluded_;
}

// Whether a policy that began at this depth, in this pass of autograd, still decides, and no torch.autocast inside of
// it: the inner one of the two decides. A torch.autocast that backward enters by itself, switched off, does not count.
inline bool holds(int depth, int task) {
  if (!native_on().empty()) return false;
  if (native_depth() <= depth) return true;
  const int now = torch::autograd::get_current_graph_task_id();
  return now != -1 && now != task;
}

// ---------------------------------------------------------------------------------------------------------------------
// The table of cast weights, one a thread

// The key of a cast weight: the tensor, and all that makes one cast of it differ from another.
struct Weight {
  const PyObject* tensor;
  ScalarType dtype;
  bool wants_grad;  // a cast made under no_grad has no path back to the weight (pytorch#65766)
  bool inference;   // one made in inference mode cannot be saved for backward

  bool operator==(const Weight& other) const {
    return tensor == other.tensor && dtype == other.dtype && wants_grad == other.wants_grad &&
           inference == other.inference;
  }
};

struct WeightHash {
  size_t operator()(const Weight& weight) const {
    const auto rest = (size_t(weight.dtype) << 2) | (size_t(weight.wants_grad) << 1) | size_t(weight.inference);
    return (reinterpret_cast<size_t>(weight.tensor) >> 4) * 31 + rest;
  }
};

struct Thread;

// The callback of a weak reference to a weight: when the weight dies, its entry is erased. Others may keep the callback
// (`weakref.getweakrefs` hands it out) longer than the entry or the thread live, so the entry that goes says so here.
struct Forget {
  PyObject_HEAD Thread* thread;  // null once the entry is gone
  Weight weight;
};

inline PyTypeObject ForgetType = {PyVarObject_HEAD_INIT(nullptr, 0)};

// The value of a cast weight.
struct Remembered {
  Remembered(py::object reference, py::object forget, uint32_t version, py::object cast)
      : reference(std::move(reference)), forget(std::move(forget)), version(version), cast(std::move(cast)) {}
  Remembered(Remembered&&) = default;
  Remembered& operator=(Remembered&&) = delete;
  Remembered(const Remembered&) = delete;
  Remembered& operator=(const Remembered&) = delete;
  ~Remembered() {
    if (forget) reinterpret_cast<Forget*>(forget.ptr())->thread = nullptr;
  }

  py::object reference;  // to the weight, weak
  py::object forget;     // its callback, a Forget; null in what was moved from
  uint32_t version;      // the weight's version counter when it was cast
  py::object cast;
};

using Casts = std::unordered_map<Weight, Remembered, WeightHash>;

// A thread's regions, and its cast weights. The dict of the interpreter's thread state owns it. The interpreter clears
// that dict, with the GIL, when the thread ends; an object of C++'s `thread_local` would be destroyed without the GIL,
// or after Python is gone.
struct Thread {
  bool inside = false;  // the thread is in some region
  bool caches = false;  // and its innermost one remembers weights
  Followed followed;    // what that region says, if inside
  Casts casts;

  void erase(const Weight& weight) {
    auto found = casts.find(weight);
    if (found == casts.end()) return;
    const Remembered gone = std::move(found->second);  // dies at the end, when the table is whole again
    casts.erase(found);
  }

  void clear() {
    Casts gone;  // dies at the end, as above
    gone.swap(casts);
  }
};

inline thread_local Thread* this_thread = nullptr;  // null before the thread's first region

// The process default, which threads outside regions follow. Never destroyed, as Python may be gone by then.
inline Followed& everyone() {
  static auto* followed = new Followed();
  return *followed;
}
inline Acting everyones_acting;  // everyone().acting, where a call reads it without asking whether everyone() is made
inline std::atomic<int> everyones_emulated = -1;  // the type that it emulates, for threads without the GIL; -1 for none

inline const Followed* region_here() {
  return this_thread != nullptr && this_thread->inside ? &this_thread->followed : nullptr;
}

// The policy whose casts act on this thread now: none inside a torch.autocast that was entered later.
inline Acting acting() {
  const Followed* const here = region_here();
  const Acting& now = here != nullptr ? here->acting : everyones_acting;
  return !now.on || (here != nullptr ? holds(here->depth, here->task) : holds(0, -1)) ? now : Acting();
}

// The type whose products are emulated on this thread now, as a number; -1 for none. Needs no GIL.
inline int emulated_type() {
  const Followed* const here = region_here();
  return here != nullptr ? here->emulated : everyones_emulated.load(std::memory_order_relaxed);
}

// Whether a product of this type is emulated here. Outside of all regions nobody tells whose backward pass it is: each
// is emulated.
inline bool emulates_here(ScalarType low) {
  const int emulated = emulated_type();
  if (region_here() == nullptr && emulated == -1) return torch::autograd::get_current_graph_task_id() != -1;
  return emulated == int(low);
}

inline void end_of_thread(PyObject* capsule) {
  auto* thread = static_cast<Thread*>(PyCapsule_GetPointer(capsule, nullptr));
  if (this_thread == thread) this_thread = nullptr;
  thread->clear();
  delete thread;
}

inline Thread& make_thread() {
  PyObject* values = PyThreadState_GetDict();  // borrowed
  if (values == nullptr) throw std::runtime_error("amp_patch: Python keeps no values for this thread");
  auto thread = std::make_unique<Thread>();
  const auto capsule = owned(PyCapsule_New(thread.get(), nullptr, &end_of_thread));
  Thread* made = thread.release();  // the capsule owns it from here on
  if (PyDict_SetItemString(values, "amp_patch.thread", capsule.ptr()) != 0) throw py::error_already_set();
  this_thread = made;
  return *made;
}

// The call of a Forget: its entry goes.
inline PyObject* forget(PyObject* self, PyObject*, PyObject*) {
  const auto& callback = *reinterpret_cast<Forget*>(self);
  if (callback.thread != nullptr) {
    const Weight weight = callback.weight;  // a copy: the entry may hold the last reference to the callback
    callback.thread->erase(weight);
  }
  Py_RETURN_NONE;
}

inline bool make_forget_type() {
  ForgetType.tp_name = "amp_patch._C.casts.forget";
  ForgetType.tp_basicsize = sizeof(Forget);
  ForgetType.tp_flags = Py_TPFLAGS_DEFAULT;
  ForgetType.tp_call = &forget;
  return PyType_Ready(&ForgetType) == 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// The cast of one tensor

// Elements. A cast of fewer takes less time than to let the GIL go and take it again.
constexpr Py_ssize_t LARGE = 32768;

// Whether the work on `tensor` takes so long that other threads should have the GIL meanwhile, as torch's own functions
// let them.
inline bool is_work(const at::Tensor& tensor) {
  return tensor.defined() && (!tensor.is_cpu() || tensor.numel() >= LARGE);
}

inline at::Tensor cast(const at::Tensor& tensor, ScalarType dtype) {
  std::optional<py::gil_scoped_release> released;
  if (is_work(tensor)) released.emplace();
  return tensor.to(dtype);
}

// Whether torch's Python functions would see this object as a tensor and nothing more.
inline bool is_plain(PyObject* object) {
  return THPVariable_CheckExact(object) && !at::impl::torch_function_mode_enabled();
}

inline py::object cast(PyObject* object, ScalarType dtype) {
  if (!is_plain(object)) return py::handle(object).attr("to")(dtype);  // a subclass or a mode may do it in its own way
  const at::Tensor tensor = THPVariable_Unpack(object);  // a copy: without the GIL, others may change `object`
  return owned(THPVariable_Wrap(cast(tensor, dtype)));
}

// Whether a function transform, a dispatch mode or a trace is on: then a cast is a stand-in, dead or wrong afterwards.
inline bool makes_stand_ins() {
  constexpr c10::DispatchKeySet modes({c10::DispatchKey::Tracer, c10::DispatchKey::FuncTorchDynamicLayerFrontMode});
  return c10::impl::tls_local_dispatch_key_set().included_.has_any(modes) ||
         c10::impl::TorchDispatchModeTLS::stack_len() > 0;
}

inline bool may_remember(PyObject* object, const at::Tensor& tensor) {
  return this_thread != nullptr && this_thread->caches && tensor.scalar_type() == ScalarType::Float &&
         tensor.is_leaf() && !tensor.is_inference() &&
         (tensor.requires_grad() ||
          PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(ParameterClass))) &&
         !makes_stand_ins();
}

// The cast of a weight that `may_remember`: the remembered one, if the weight was not written since.
inline py::object cast_weight(PyObject* object, const at::Tensor& tensor, ScalarType dtype) {
  Thread* const thread = this_thread;
  const bool wants_grad = tensor.requires_grad() && at::GradMode::is_enabled();
  const Weight weight{object, dtype, wants_grad, c10::InferenceMode::is_enabled()};
  const uint32_t version = tensor._version();  // before the cast: another thread may change the weight meanwhile
  const auto found = thread->casts.find(weight);
  if (found != thread->casts.end() && found->second.version == version) {
    PyObject* alive = nullptr;  // the key is an address, and may be that of an object which has died
    if (PyWeakref_GetRef(found->second.reference.ptr(), &alive) < 0) throw py::error_already_set();
    const bool same = alive == object;
    Py_XDECREF(alive);  // frees nothing: the caller holds `object` too
    if (same) return found->second.cast;
  }
  py::object result = cast(object, dtype);
  auto forget = owned(reinterpret_cast<PyObject*>(PyObject_New(Forget, &ForgetType)));
  auto* callback = reinterpret_cast<Forget*>(forget.ptr());
  callback->thread = nullptr;
  callback->weight = weight;
  auto reference = owned(PyWeakref_NewRef(object, forget.ptr()));
  thread->erase(weight);
  if (!thread->caches) return result;  // Python code that ran during the cast may have left the region
  callback->thread = thread;
  thread->casts.emplace(weight, Remembered(std::move(reference), std::move(forget), version, result));
  return result;
}

}  // namespace casts
}  // namespace amp_patch

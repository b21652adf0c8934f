// The policy whose casts act on this thread, and the thread's cached casts of weights: the state of the Python class
// `PythonState` in amp_patch/casts/, as plain C++ values, so that a patched function reads it without a call into
// Python. rules.h includes this file, and wrapper.cpp includes both.
//
// Everything here runs under the GIL; only a cast of a large tensor releases it. Other Python code may run in two
// places: during a cast (it may release the GIL, and dispatch modes are Python), and when an object is freed. So no
// iterator into a table and no reference to an entry is held across either.
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

// Returns an object that owns a new reference; if the reference is null, throws the Python exception that is set.
inline py::object owned(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// ---------------------------------------------------------------------------------------------------------------------
// The acting policy

// The fields of a policy (amp_patch/policy.py) that a call reads, as plain values.
struct Acting {
  bool on = false;              // a policy acts, by the op lists
  bool apex = false;            // its op lists are Apex's
  bool low_norms = false;       // norms return their input's type; the Python wrappers do this
  bool low_bit = false;         // products are in FP8 or FP4; the Python wrappers do this
  bool allows_banned = false;   // binary cross entropy and sigmoids run in FP32
  bool products_alone = false;  // only products are cast
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
  int depth = 0;      // the number of torch.autocasts around its beginning
  int task = -1;      // the backward pass at its beginning; -1 for none
};

inline Followed follow_policy(const py::object& policy, const py::object& emulated, int depth = 0, int task = -1) {
  const int type = emulated.is_none() ? -1 : int(py::cast<ScalarType>(emulated));
  return {policy, acting_of(policy), type, depth, task};
}

// The number of torch.autocast regions that this thread is in. Torch returns it only from a change of it.
inline int native_depth() {
  at::autocast::increment_nesting();
  return at::autocast::decrement_nesting();
}

// The device types whose torch.autocast is enabled, as dispatch keys.
inline c10::DispatchKeySet native_on() {
  return c10::autocast_dispatch_keyset - c10::impl::tls_local_dispatch_key_set().excluded_;
}

// Tells whether a policy that began at this depth, in this pass of autograd, still acts. It does not if a
// torch.autocast was entered inside its region, because the innermost of the two decides. A disabled torch.autocast
// that backward enters is ignored.
inline bool holds(int depth, int task) {
  if (!native_on().empty()) return false;
  if (native_depth() <= depth) return true;
  const int now = torch::autograd::get_current_graph_task_id();
  return now != -1 && now != task;
}

// ---------------------------------------------------------------------------------------------------------------------
// The table of cast weights, one a thread

// The key of a cached cast: the tensor, and all other conditions that change its cast.
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

// The callback of a weak reference to a weight: when the weight is freed, its entry is erased. Python code may keep the
// callback (`weakref.getweakrefs` returns it) longer than the entry or the thread exist, so an erased entry clears
// `thread` here.
struct Forget {
  PyObject_HEAD Thread* thread;  // null once the entry is gone
  Weight weight;
};

inline PyTypeObject ForgetType = {PyVarObject_HEAD_INIT(nullptr, 0)};

// The value of a cached cast.
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

  py::object reference;  // a weak reference to the weight
  py::object forget;     // its callback, a Forget; null after a move
  uint32_t version;      // the weight's version counter when it was cast
  py::object cast;
};

using Casts = std::unordered_map<Weight, Remembered, WeightHash>;

// A thread's innermost region, and its cached casts. The dict of the interpreter's thread state owns this object, and
// the interpreter clears that dict with the GIL when the thread ends. A C++ `thread_local` object would be destroyed
// without the GIL, or after Python has ended.
struct Thread {
  bool inside = false;  // the thread is in some region
  bool caches = false;  // and the innermost one caches casts of weights
  Followed followed;    // the policy of that region, if inside
  Casts casts;

  void erase(const Weight& weight) {
    auto found = casts.find(weight);
    if (found == casts.end()) return;
    const Remembered gone = std::move(found->second);  // freed at the end, when the table is consistent
    casts.erase(found);
  }

  void clear() {
    Casts gone;  // freed at the end, as in `erase`
    gone.swap(casts);
  }
};

inline thread_local Thread* this_thread = nullptr;  // null before the thread's first region

// The process default, which threads outside regions follow. Never destroyed, as Python may be gone by then.
inline Followed& everyone() {
  static auto* followed = new Followed();
  return *followed;
}
inline Acting everyones_acting;                   // copy of everyone().acting that a call reads without a test
inline std::atomic<int> everyones_emulated = -1;  // type that this policy emulates, read without the GIL; -1 for none

inline const Followed* region_here() {
  return this_thread != nullptr && this_thread->inside ? &this_thread->followed : nullptr;
}

// The policy whose casts act on this thread now: none inside a torch.autocast that was entered later.
inline Acting acting() {
  const Followed* const here = region_here();
  const Acting& now = here != nullptr ? here->acting : everyones_acting;
  return !now.on || (here != nullptr ? holds(here->depth, here->task) : holds(0, -1)) ? now : Acting();
}

// The type whose products are emulated on this thread now, as a number; -1 for none. Does not need the GIL.
inline int emulated_type() {
  const Followed* const here = region_here();
  return here != nullptr ? here->emulated : everyones_emulated.load(std::memory_order_relaxed);
}

// Tells whether a product of this type is emulated here. Outside of all regions the training of a backward pass is
// unknown, so products in every backward pass are emulated.
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

// The call of a Forget: erases its entry.
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

// Elements. A cast of fewer takes less time than a release of the GIL.
constexpr Py_ssize_t LARGE = 32768;

// Tells whether the work on `tensor` is long enough to release the GIL for other threads, as torch's own functions do.
inline bool is_work(const at::Tensor& tensor) {
  return tensor.defined() && (!tensor.is_cpu() || tensor.numel() >= LARGE);
}

inline at::Tensor cast(const at::Tensor& tensor, ScalarType dtype) {
  std::optional<py::gil_scoped_release> released;
  if (is_work(tensor)) released.emplace();
  return tensor.to(dtype);
}

// Tells whether torch's Python functions would treat this object as a plain tensor.
inline bool is_plain(PyObject* object) {
  return THPVariable_CheckExact(object) && !at::impl::torch_function_mode_enabled();
}

inline py::object cast(PyObject* object, ScalarType dtype) {
  if (!is_plain(object)) return py::handle(object).attr("to")(dtype);  // a subclass or a mode may override the cast
  const at::Tensor tensor = THPVariable_Unpack(object);  // a copy: without the GIL another thread may change `object`
  return owned(THPVariable_Wrap(cast(tensor, dtype)));
}

// Tells whether a function transform, a dispatch mode or a trace is active. A cast made in one has no use afterwards.
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

// The cast of a weight for which `may_remember` is true: the cached one, if the weight was not written since.
inline py::object cast_weight(PyObject* object, const at::Tensor& tensor, ScalarType dtype) {
  Thread* const thread = this_thread;
  const bool wants_grad = tensor.requires_grad() && at::GradMode::is_enabled();
  const Weight weight{object, dtype, wants_grad, c10::InferenceMode::is_enabled()};
  const uint32_t version = tensor._version();  // before the cast: another thread may write the weight during it
  const auto found = thread->casts.find(weight);
  if (found != thread->casts.end() && found->second.version == version) {
    PyObject* alive = nullptr;  // the key is an address, which a freed object may have had
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
  if (!thread->caches) return result;  // Python code may have left the region during the cast
  callback->thread = thread;
  thread->casts.emplace(weight, Remembered(std::move(reference), std::move(forget), version, result));
  return result;
}

}  // namespace casts
}  // namespace amp_patch

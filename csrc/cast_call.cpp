// The O1 call in C: what stands in place of torch's functions while casts are installed (amp_patch/casts.py), whose
// casts act, and the cast weights (amp_patch/regions.py). amp_patch/rules.py says in Python what each rule does: a
// wrapper here does the frequent rules itself and leaves every other call to the Python wrapper that it stands for.
//
// Everything runs under the GIL, save the work on large tensors. Two things may let other Python code run: a cast (it
// may release the GIL, and dispatch modes are Python) and the death of an object. So no iterator or reference into a
// table is held across either.
#include <torch/csrc/python_headers.h>
// Python's own header stays in front: the next ones need it.
#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>
#include <structmember.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

namespace amp_patch {
namespace {

using at::ScalarType;

constexpr Py_ssize_t LARGE = 32768;  // elements; below, a cast takes less time than handing the GIL over and back
constexpr int DEEP = 16;  // containers in containers; Python takes what lies deeper (a list that holds itself)

bool is_low(ScalarType type) { return type == ScalarType::Half || type == ScalarType::BFloat16; }
bool is_narrow(ScalarType type) { return is_low(type) || type == ScalarType::Float; }

bool is_tensor(PyObject* object) {
  if (THPVariable_CheckExact(object)) return true;
  PyTypeObject* const type = Py_TYPE(object);  // None, numbers, strings and the like are no heap types
  return (type->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0 &&
         PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

bool is_sequence(PyObject* object) { return PyList_Check(object) || PyTuple_Check(object); }

py::object owned(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// --------------------------------------------------------------------------------------------------------------------
// Whose casts act here and now

// What the calls need of a policy, as plain values: they read it without touching a Python object.
struct Acting {
  bool on = false;        // there is a policy
  bool patches = false;   // its casts are those of the op lists
  bool emulates = false;  // FP16 on a CPU (amp_patch/cpu_fp16.py): Python's, whether it patches or not
  bool apex = false;      // by Apex's op lists
  ScalarType low = ScalarType::Half;
};

Acting acting_of(const py::object& policy) {
  Acting acting;
  if (!policy.is_none()) {
    acting.on = true;
    acting.patches = py::cast<bool>(policy.attr("patch_torch_functions"));
    acting.emulates = py::cast<bool>(py::getattr(policy, "emulates", py::bool_(false)));
    acting.apex = py::cast<std::string>(py::getattr(policy, "op_lists", py::str("torch"))) == "apex";
    acting.low = py::cast<ScalarType>(policy.attr("dtype"));
  }
  return acting;
}

struct Followed {
  py::object policy = py::none();
  py::object aside = py::none();  // what is left of it where a torch.autocast inside has the word
  Acting acting, aside_acting;
  int depth = 0;  // how many torch.autocast regions were entered before
  int task = -1;  // the pass of autograd in which it began to hold
};

Followed follow_policy(const py::object& policy, const py::object& aside, int depth = 0, int task = -1) {
  return {policy, aside, acting_of(policy), acting_of(aside), depth, task};
}

int native_depth() {  // torch tells only whom it counts
  at::autocast::increment_nesting();
  return at::autocast::decrement_nesting();
}

// The device types whose torch.autocast is on, by the dispatcher's names for their casts.
c10::DispatchKeySet native_on() {
  return c10::autocast_dispatch_keyset - c10::impl::tls_local_dispatch_key_set().excluded_;
}

// Whether the word is ours, and no torch.autocast's inside. See amp_patch/regions.py.
bool holds(int depth, int task) {
  if (!native_on().empty()) return false;
  if (native_depth() <= depth) return true;
  const int now = torch::autograd::get_current_graph_task_id();
  return now != -1 && now != task;
}

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

// The callback of the weak reference to a weight: its entry goes when it goes. Somebody else may keep it longer than
// the entry and the thread (`weakref.getweakrefs`), so the entry tells it when there is nothing left to do.
struct Forget {
  PyObject_HEAD Thread* thread;  // null once the entry is gone
  Weight weight;
};

PyTypeObject ForgetType = {PyVarObject_HEAD_INIT(nullptr, 0)};

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

  py::object reference;
  py::object forget;
  uint32_t version;
  py::object cast;
};

using Casts = std::unordered_map<Weight, Remembered, WeightHash>;

// The regions of one thread. It lives in the dict of the interpreter's thread state, which the interpreter clears, with
// the GIL, when the thread ends: a thread_local object would be destroyed without it, or after Python is gone.
struct Thread {
  bool inside = false;  // some region
  bool caches = false;  // and the innermost one remembers weights
  Followed followed;    // what that region says, if inside
  Casts casts;

  void erase(const Weight& weight) {
    auto found = casts.find(weight);
    if (found == casts.end()) return;
    const Remembered gone = std::move(found->second);  // dies at the end, when the table is whole again
    casts.erase(found);
  }

  void clear() {
    Casts gone;
    gone.swap(casts);
  }
};

thread_local Thread* this_thread = nullptr;  // null until the thread enters its first region

Followed& everyone() {  // what threads outside regions follow; never destroyed: Python may be gone by then
  static auto* followed = new Followed();
  return *followed;
}
Acting everyones_acting;  // a copy of its plain part, for the calls

const Followed* region_here() {
  return this_thread != nullptr && this_thread->inside ? &this_thread->followed : nullptr;
}

const Acting& acting() {
  const Followed* const here = region_here();
  const Acting& now = here != nullptr ? here->acting : everyones_acting;
  if (!now.on || (here != nullptr ? holds(here->depth, here->task) : holds(0, -1))) return now;
  return (here != nullptr ? *here : everyone()).aside_acting;
}

void end_of_thread(PyObject* capsule) {
  auto* thread = static_cast<Thread*>(PyCapsule_GetPointer(capsule, nullptr));
  if (this_thread == thread) this_thread = nullptr;
  thread->clear();
  delete thread;
}

Thread& make_thread() {
  PyObject* values = PyThreadState_GetDict();  // borrowed
  if (values == nullptr) throw std::runtime_error("amp_patch: Python keeps no values for this thread");
  auto thread = std::make_unique<Thread>();
  const auto capsule = owned(PyCapsule_New(thread.get(), nullptr, &end_of_thread));
  Thread* made = thread.release();  // the capsule's now
  if (PyDict_SetItemString(values, "amp_patch.thread", capsule.ptr()) != 0) throw py::error_already_set();
  this_thread = made;
  return *made;
}

// --------------------------------------------------------------------------------------------------------------------
// One cast

// Whether handing the GIL over and back, as torch's own functions do, takes less time than the work on `tensor`.
bool is_work(const at::Tensor& tensor) { return tensor.defined() && (!tensor.is_cpu() || tensor.numel() >= LARGE); }

at::Tensor cast(const at::Tensor& tensor, ScalarType dtype) {
  std::optional<py::gil_scoped_release> released;
  if (is_work(tensor)) released.emplace();
  return tensor.to(dtype);
}

// Whether torch's Python functions would see this object as a tensor and nothing more.
bool is_plain(PyObject* object) { return THPVariable_CheckExact(object) && !at::impl::torch_function_mode_enabled(); }

py::object cast(PyObject* object, ScalarType dtype) {
  if (!is_plain(object)) return py::handle(object).attr("to")(dtype);  // a subclass or a mode has its own word in it
  const at::Tensor tensor = THPVariable_Unpack(object);                // ours: without the GIL `object` may change
  return owned(THPVariable_Wrap(cast(tensor, dtype)));
}

// Under a function transform, a dispatch mode or a trace a cast is a stand-in that is dead or wrong afterwards.
bool makes_stand_ins() {
  constexpr c10::DispatchKeySet modes({c10::DispatchKey::Tracer, c10::DispatchKey::FuncTorchDynamicLayerFrontMode});
  return c10::impl::tls_local_dispatch_key_set().included_.has_any(modes) ||
         c10::impl::TorchDispatchModeTLS::stack_len() > 0;
}

bool may_remember(PyObject* object, const at::Tensor& tensor) {
  return this_thread != nullptr && this_thread->caches && tensor.scalar_type() == ScalarType::Float &&
         tensor.is_leaf() && !tensor.is_inference() &&
         (tensor.requires_grad() ||
          PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(ParameterClass))) &&
         !makes_stand_ins();
}

// The cast of a weight that `may_remember`.
py::object cast_weight(PyObject* object, const at::Tensor& tensor, ScalarType dtype) {
  Thread* const thread = this_thread;
  const bool wants_grad = tensor.requires_grad() && at::GradMode::is_enabled();
  const Weight weight{object, dtype, wants_grad, c10::InferenceMode::is_enabled()};
  const uint32_t version = tensor._version();  // before the cast: another thread may change the weight meanwhile
  const auto found = thread->casts.find(weight);
  if (found != thread->casts.end() && found->second.version == version) {
    PyObject* alive = nullptr;  // an address is used again when its object has died
    if (PyWeakref_GetRef(found->second.reference.ptr(), &alive) < 0) throw py::error_already_set();
    const bool same = alive == object;
    Py_XDECREF(alive);  // `object` is the caller's as well: this is not its death
    if (same) return found->second.cast;
  }
  py::object result = cast(object, dtype);
  auto forget = owned(reinterpret_cast<PyObject*>(PyObject_New(Forget, &ForgetType)));
  auto* callback = reinterpret_cast<Forget*>(forget.ptr());
  callback->thread = nullptr;
  callback->weight = weight;
  auto reference = owned(PyWeakref_NewRef(object, forget.ptr()));
  thread->erase(weight);
  if (!thread->caches) return result;  // what ran meanwhile has left the region
  callback->thread = thread;
  thread->casts.emplace(weight, Remembered(std::move(reference), std::move(forget), version, result));
  return result;
}

// --------------------------------------------------------------------------------------------------------------------
// The arguments of one call

// Calls `see` with every tensor in `object`, containers opened; false if it meets what is better left to Python.
template <class See>
bool each_tensor(PyObject* object, const See& see, int depth = 0) {
  if (is_sequence(object)) {
    if (depth == DEEP) return false;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
      if (!each_tensor(PySequence_Fast_GET_ITEM(object, i), see, depth + 1)) return false;
    }
    return true;
  }
  if (is_tensor(object)) see(object, THPVariable_Unpack(object));
  return !PyDict_Check(object);
}

// What a cast of a call's arguments does: narrow floating tensors become `to`. float64, integer, complex and 8-bit
// tensors are never touched.
struct Cast {
  ScalarType to;
  bool remembers;  // FP32 weights go through the cache

  enum class Found { nothing, something, unusual };

  bool casts(ScalarType type) const { return type != to && is_narrow(type); }

  // Whether there is anything to cast; in sequences of tensors (or of sequences) too: all that torch's functions take.
  Found look(PyObject* object, int depth = 0) const {
    if (is_sequence(object)) {
      if (depth == DEEP) return Found::unusual;
      const Py_ssize_t size = PySequence_Fast_GET_SIZE(object);
      if (size == 0) return Found::nothing;
      PyObject* first = PySequence_Fast_GET_ITEM(object, 0);
      if (!is_sequence(first) && !is_tensor(first)) return Found::nothing;
      for (Py_ssize_t i = 0; i < size; ++i) {
        const Found found = look(PySequence_Fast_GET_ITEM(object, i), depth + 1);
        if (found != Found::nothing) return found;
      }
      return Found::nothing;
    }
    return is_tensor(object) && casts(THPVariable_Unpack(object).scalar_type()) ? Found::something : Found::nothing;
  }

  py::object operator()(PyObject* object, int depth = 0) const {
    if (!is_sequence(object)) {
      const at::Tensor& tensor = THPVariable_Unpack(object);
      return remembers && may_remember(object, tensor) ? cast_weight(object, tensor, to) : cast(object, to);
    }
    if (depth == DEEP) {  // `look` stops at the first tensor; behind it a list may hold itself
      PyErr_SetString(PyExc_RecursionError, "the arguments hold lists in lists without end");
      throw py::error_already_set();
    }
    auto items = owned(PySequence_List(object));  // our own: another thread may change the caller's
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items.ptr()); ++i) {
      PyObject* item = PyList_GET_ITEM(items.ptr(), i);
      if (look(item) != Found::something) continue;
      py::object result = (*this)(item, depth + 1);
      PyList_SetItem(items.ptr(), i, result.release().ptr());  // cannot fail: i is in range, the list is ours
    }
    return PyList_Check(object) ? items : owned(PyList_AsTuple(items.ptr()));
  }

  // A plain tensor as it is or cast, without a Python object for the cast.
  at::Tensor of_plain(PyObject* object) const {
    const at::Tensor tensor = THPVariable_Unpack(object);
    if (!casts(tensor.scalar_type())) return tensor;
    if (remembers && may_remember(object, tensor)) return THPVariable_Unpack(cast_weight(object, tensor, to).ptr());
    return cast(tensor, to);
  }
};

// The arguments of a vectorcall; the values of keywords follow the positional ones.
struct Arguments {
  PyObject* const* values;
  size_t flagged;  // the number of positional ones, with the flag that vectorcall puts into it
  PyObject* names;

  Py_ssize_t positional() const { return PyVectorcall_NARGS(flagged); }
  Py_ssize_t size() const { return positional() + (names == nullptr ? 0 : PyTuple_GET_SIZE(names)); }

  // The value of a keyword; null if it is not given or None.
  PyObject* keyword(PyObject* wanted) const {
    if (names == nullptr) return nullptr;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
      PyObject* name = PyTuple_GET_ITEM(names, i);
      const bool same_length = PyUnicode_GET_LENGTH(name) == PyUnicode_GET_LENGTH(wanted);
      if (name == wanted || (same_length && PyUnicode_Compare(name, wanted) == 0)) {
        PyObject* value = values[positional() + i];
        return value == Py_None ? nullptr : value;
      }
    }
    return nullptr;
  }

  PyObject* call(PyObject* function) const { return PyObject_Vectorcall(function, values, flagged, names); }
};

// The floating types of a call and what they promote to. A tensor without dimensions decides only where there is no
// other, as in torch's own promotion.
struct Widest {
  std::optional<ScalarType> first, all, dimensioned;
  bool mixed = false;

  void add(const at::Tensor& tensor) {
    const ScalarType type = tensor.scalar_type();
    if (!is_narrow(type) && type != ScalarType::Double) return;
    const auto promote = [type](std::optional<ScalarType>& into) {
      into = into ? c10::promoteTypes(*into, type) : type;
    };
    promote(all);
    if (tensor.dim() > 0) promote(dimensioned);
    mixed = mixed || (first && *first != type);
    if (!first) first = type;
  }
};

// --------------------------------------------------------------------------------------------------------------------
// The rules

// other: Python's alone
enum class Rule { none, lower, fp32, widest, mixed_fp32, match_self, emulated, other };

// Which of them act also while FP16 is emulated and nothing is cast; fp32 then alone, for some names.
bool emulates(Rule rule, bool patches) {
  switch (rule) {
    case Rule::none:
    case Rule::widest:
    case Rule::mixed_fp32:
      return false;
    case Rule::fp32:
      return !patches;
    default:
      return true;
  }
}

Rule rule_named(const std::string& name) {
  static const std::unordered_map<std::string, Rule> rules = {
      {"none", Rule::none},         {"lower", Rule::lower},           {"fp32", Rule::fp32},
      {"widest", Rule::widest},     {"mixed_fp32", Rule::mixed_fp32}, {"match_self", Rule::match_self},
      {"emulated", Rule::emulated},
  };
  const auto found = rules.find(name);
  return found == rules.end() ? Rule::other : found->second;
}

PyObject *OUT, *DTYPE;  // interned

enum class Route { original, python, cast };

// Which way a call goes while casts act, and for `Route::cast` which cast. No Python code runs in here.
Route route(Rule rule, const Acting& acting, const Arguments& given, Cast& cast) {
  if (acting.emulates && emulates(rule, acting.patches)) return Route::python;
  if (!acting.patches || rule == Rule::none) return Route::original;
  if (rule == Rule::other) return Route::python;
  if (given.keyword(OUT) != nullptr) return Route::original;

  cast = {ScalarType::Float, false};
  switch (rule) {
    case Rule::lower:
      cast.to = acting.low;
      cast.remembers = true;
      break;
    case Rule::fp32:
      if (given.keyword(DTYPE) != nullptr) return Route::original;  // an explicit type is the user's word
      break;
    case Rule::emulated:
    case Rule::mixed_fp32:
    case Rule::widest: {
      Widest widest;
      for (Py_ssize_t i = 0; i < given.size(); ++i) {
        const auto add = [&](PyObject*, const at::Tensor& tensor) { widest.add(tensor); };
        if (!each_tensor(given.values[i], add)) return Route::python;
      }
      if (!widest.mixed) return Route::original;
      if (rule == Rule::mixed_fp32 && *widest.all == ScalarType::Double) return Route::python;  // which refuses it
      if (rule == Rule::mixed_fp32 || !widest.dimensioned) {
        cast.to = *widest.all;
      } else {
        cast.to = *widest.dimensioned;
      }
      break;
    }
    default:  // match_self
      if (given.positional() == 0 || !is_tensor(given.values[0])) return Route::python;
      cast.to = THPVariable_Unpack(given.values[0]).scalar_type();
      if (!is_narrow(cast.to) && cast.to != ScalarType::Double) return Route::original;
  }
  Route way = Route::original;
  for (Py_ssize_t i = 0; i < given.size(); ++i) {
    const auto found = cast.look(given.values[i]);
    if (found == Cast::Found::unusual) return Route::python;
    if (found == Cast::Found::something) way = Route::cast;
  }
  return way;
}

// --------------------------------------------------------------------------------------------------------------------
// The products that models are made of, straight from C++: their operands' casts need no Python object, and there are
// no arguments to parse. This makes up for what the call through a wrapper takes, and more.

using Product = at::Tensor (*)(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias);

struct Known {
  const char *owner, *name;  // where torch keeps it, in torch._C
  bool takes_bias;
  Product product;
};

at::Tensor matmul(const at::Tensor& a, const at::Tensor& b, const at::Tensor&) { return at::matmul(a, b); }
at::Tensor mm(const at::Tensor& a, const at::Tensor& b, const at::Tensor&) { return at::mm(a, b); }
at::Tensor bmm(const at::Tensor& a, const at::Tensor& b, const at::Tensor&) { return at::bmm(a, b); }
at::Tensor linear(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias) {
  return bias.defined() ? at::linear(a, b, bias) : at::linear(a, b);
}

constexpr Known KNOWN[] = {
    {"TensorBase", "__matmul__", false, &matmul},
    {"TensorBase", "matmul", false, &matmul},
    {"TensorBase", "mm", false, &mm},
    {"TensorBase", "bmm", false, &bmm},
    {"_VariableFunctions", "mm", false, &mm},
    {"_VariableFunctions", "bmm", false, &bmm},
    {"_nn", "linear", true, &linear},
    {"_VariableFunctions", "matmul", false, &matmul},
};

// Torch's own function alone: what somebody else has put in its place is called as it is.
const Known* known_product(const py::object& original) {
  const py::object torch = py::module_::import("torch._C");
  for (const Known& known : KNOWN) {
    if (py::getattr(torch.attr(known.owner), known.name, py::none()).is(original)) return &known;
  }
  return nullptr;
}

bool are_operands(const Arguments& given, bool takes_bias) {
  const Py_ssize_t size = given.positional();
  if (given.names != nullptr || (size != 2 && !(takes_bias && size == 3))) return false;
  return is_plain(given.values[0]) && is_plain(given.values[1]) &&
         (size == 2 || given.values[2] == Py_None || is_plain(given.values[2]));
}

PyObject* multiply(Product product, const Arguments& given, const Cast& cast) {
  HANDLE_TH_ERRORS
  at::Tensor operands[3];
  for (Py_ssize_t i = 0; i < given.positional(); ++i) {
    if (given.values[i] != Py_None) operands[i] = cast.of_plain(given.values[i]);
  }
  at::Tensor result;
  {
    std::optional<py::gil_scoped_release> released;
    if (is_work(operands[0]) || is_work(operands[1])) released.emplace();
    result = product(operands[0], operands[1], operands[2]);
  }
  return THPVariable_Wrap(std::move(result));
  END_HANDLE_TH_ERRORS
}

// --------------------------------------------------------------------------------------------------------------------
// The callables

// One patched function: `original` with casts. In front of `reference`, the Python wrapper of the same function, whose
// attributes are this object's too. It binds as a Python function does. It is also what a builtin (made for an original
// that is one, and binds as that: not at all) has as its `__self__`.
struct Wrapper {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* original;
  PyObject* reference;
  PyObject* weak_references;
  PyMethodDef definition;  // of the builtin: its name and docstring are the original's own
  Rule rule, apex_rule;
  const Known* known;    // null for most
  objobjargproc assign;  // of a `__setitem__` that is a type's own slot; else null
};

PyTypeObject WrapperType = {PyVarObject_HEAD_INIT(nullptr, 0)};

Wrapper* wrapper(PyObject* self) { return reinterpret_cast<Wrapper*>(self); }

struct Casted {
  c10::SmallVector<PyObject*, 12> values;  // one slot in front, which vectorcall may use
  c10::SmallVector<py::object, 4> made;

  bool fill(const Arguments& given, const Cast& cast) {
    HANDLE_TH_ERRORS
    values.reserve(given.size() + 1);
    values.push_back(nullptr);
    values.append(given.values, given.values + given.size());
    for (Py_ssize_t i = 0; i < given.size(); ++i) {
      if (cast.look(given.values[i]) != Cast::Found::something) continue;
      made.push_back(cast(given.values[i]));
      values[i + 1] = made.back().ptr();
    }
    return true;
    END_HANDLE_TH_ERRORS_RET(false)
  }
};

// Without casts. Assignment has no vectorcall: without the short way it would cost a tuple and a parse of it.
PyObject* call_original(const Wrapper& called, const Arguments& given) {
  if (called.assign != nullptr && given.positional() == 3 && given.names == nullptr && is_tensor(given.values[0])) {
    if (called.assign(given.values[0], given.values[1], given.values[2]) != 0) return nullptr;
    Py_RETURN_NONE;
  }
  return given.call(called.original);
}

PyObject* call_with_casts(PyObject* original, const Arguments& given, const Cast& cast) {
  Casted casted;
  if (!casted.fill(given, cast)) return nullptr;
  const size_t flagged = size_t(given.positional()) | PY_VECTORCALL_ARGUMENTS_OFFSET;
  return PyObject_Vectorcall(original, casted.values.data() + 1, flagged, given.names);
}

PyObject* vectorcall(PyObject* self, PyObject* const* values, size_t flagged, PyObject* names) {
  const Wrapper& called = *wrapper(self);
  const Arguments given{values, flagged, names};
  const Acting now = acting();
  if (!now.on) return call_original(called, given);
  if (called.known != nullptr && now.patches && !now.emulates && are_operands(given, called.known->takes_bias)) {
    return multiply(called.known->product, given, {now.low, true});
  }
  Cast cast{};
  switch (route(now.apex ? called.apex_rule : called.rule, now, given, cast)) {
    case Route::python:
      return given.call(called.reference);
    case Route::cast:
      return call_with_casts(called.original, given, cast);
    default:
      return call_original(called, given);
  }
}

PyObject* builtin(PyObject* self, PyObject* const* values, Py_ssize_t positional, PyObject* names) {
  return vectorcall(self, values, size_t(positional), names);
}

PyObject* bind(PyObject* self, PyObject* instance, PyObject*) {
  if (instance == nullptr || instance == Py_None) return Py_NewRef(self);
  return PyMethod_New(self, instance);
}

PyObject* get_attribute(PyObject* self, PyObject* name) {
  PyObject* found = PyObject_GenericGetAttr(self, name);
  if (found != nullptr || !PyErr_ExceptionMatches(PyExc_AttributeError)) return found;
  PyErr_Clear();
  return PyObject_GetAttr(wrapper(self)->reference, name);
}

int set_attribute(PyObject* self, PyObject* name, PyObject* value) {
  return PyObject_SetAttr(wrapper(self)->reference, name, value);
}

// What every type answers for its instances, and what only the reference can answer.
PyObject* of_reference(PyObject* self, void* name) {
  return PyObject_GetAttrString(wrapper(self)->reference, static_cast<const char*>(name));
}

// torch.jit compiles what `inspect.isfunction` accepts (through `__prepare_scriptable__`), and nothing else.
PyObject* apparent_class(PyObject* self, void*) {
  PyTypeObject* type = PyFunction_Check(wrapper(self)->original) ? &PyFunction_Type : Py_TYPE(self);
  return Py_NewRef(reinterpret_cast<PyObject*>(type));
}

// A string is a global name, as functions have it. The pickle of a builtin is "attribute `name` of `__self__`": give it
// an object with such an attribute, which is pickled as the reference is, by the address where it is installed.
PyObject* reduce(PyObject* self, PyObject*) {
  HANDLE_TH_ERRORS
  const Wrapper& reduced = *wrapper(self);
  if (!PyCFunction_Check(reduced.original)) return PyObject_GetAttrString(reduced.reference, "__qualname__");
  py::dict attributes;
  attributes[reduced.definition.ml_name] = py::handle(reduced.reference);
  return py::make_tuple(py::module_::import("types").attr("SimpleNamespace"), py::tuple(), attributes).release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* represent(PyObject* self) { return PyUnicode_FromFormat("<casts of %R>", wrapper(self)->original); }

// No tp_clear: a cycle through a wrapper passes through the attributes of its reference, and is broken there.
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(wrapper(self)->original);
  Py_VISIT(wrapper(self)->reference);
  return 0;
}

void deallocate(PyObject* self) {
  PyObject_GC_UnTrack(self);
  if (wrapper(self)->weak_references != nullptr) PyObject_ClearWeakRefs(self);
  Py_XDECREF(wrapper(self)->original);
  Py_XDECREF(wrapper(self)->reference);
  PyObject_GC_Del(self);
}

PyMethodDef wrapper_methods[] = {
    {"__reduce__", &reduce, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef wrapper_members[] = {
    {"__wrapped__", T_OBJECT_EX, offsetof(Wrapper, original), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef wrapper_attributes[] = {
    {"__class__", &apparent_class, nullptr, nullptr, nullptr},
    {"__doc__", &of_reference, nullptr, nullptr, const_cast<char*>("__doc__")},
    {"__module__", &of_reference, nullptr, nullptr, const_cast<char*>("__module__")},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyObject* forget(PyObject* self, PyObject*, PyObject*) {
  const auto& callback = *reinterpret_cast<Forget*>(self);
  if (callback.thread != nullptr) {
    const Weight weight = callback.weight;  // of our own: the entry may hold the last reference to the callback
    callback.thread->erase(weight);
  }
  Py_RETURN_NONE;
}

bool make_types() {
  WrapperType.tp_name = "amp_patch._C.casts.wrapper";
  WrapperType.tp_basicsize = sizeof(Wrapper);
  WrapperType.tp_flags =
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR;
  WrapperType.tp_vectorcall_offset = offsetof(Wrapper, vectorcall);
  WrapperType.tp_call = &PyVectorcall_Call;
  WrapperType.tp_descr_get = &bind;
  WrapperType.tp_getattro = &get_attribute;
  WrapperType.tp_setattro = &set_attribute;
  WrapperType.tp_repr = &represent;
  WrapperType.tp_traverse = &traverse;
  WrapperType.tp_dealloc = &deallocate;
  WrapperType.tp_weaklistoffset = offsetof(Wrapper, weak_references);
  WrapperType.tp_methods = wrapper_methods;
  WrapperType.tp_members = wrapper_members;
  WrapperType.tp_getset = wrapper_attributes;

  ForgetType.tp_name = "amp_patch._C.casts.forget";
  ForgetType.tp_basicsize = sizeof(Forget);
  ForgetType.tp_flags = Py_TPFLAGS_DEFAULT;
  ForgetType.tp_call = &forget;
  return PyType_Ready(&WrapperType) == 0 && PyType_Ready(&ForgetType) == 0;
}

// The C form of `reference`, the Python wrapper of `original`: a builtin for a builtin, else a callable that binds.
py::object wrap(const py::object& original, const py::object& reference, const std::string& rule,
                const std::string& apex_rule) {
  auto* made = PyObject_GC_New(Wrapper, &WrapperType);
  const auto result = owned(reinterpret_cast<PyObject*>(made));
  made->vectorcall = &vectorcall;
  made->original = Py_NewRef(original.ptr());
  made->reference = Py_NewRef(reference.ptr());
  made->weak_references = nullptr;
  made->rule = rule_named(rule);
  made->apex_rule = rule_named(apex_rule);
  made->known = nullptr;
  made->assign = nullptr;
  made->definition = {};
  PyObject_GC_Track(result.ptr());
  if (Py_IS_TYPE(original.ptr(), &PyWrapperDescr_Type)) {
    const auto& slot = *reinterpret_cast<PyWrapperDescrObject*>(original.ptr());
    const bool assigns =
        std::string(slot.d_base->name) == "__setitem__" && PyDescr_TYPE(&slot)->tp_as_mapping != nullptr &&
        slot.d_wrapped == reinterpret_cast<void*>(PyDescr_TYPE(&slot)->tp_as_mapping->mp_ass_subscript);
    if (assigns) made->assign = reinterpret_cast<objobjargproc>(slot.d_wrapped);
  }
  if (made->rule == Rule::lower && made->apex_rule == Rule::lower) made->known = known_product(original);
  if (!PyCFunction_Check(original.ptr())) return result;

  const PyMethodDef& found = *reinterpret_cast<PyCFunctionObject*>(original.ptr())->m_ml;
  auto* const function = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&builtin));
  made->definition = {found.ml_name, function, METH_FASTCALL | METH_KEYWORDS, found.ml_doc};
  const py::object module = py::getattr(original, "__module__", py::none());
  return owned(PyCFunction_NewEx(&made->definition, result.ptr(), module.is_none() ? nullptr : module.ptr()));
}

}  // namespace

void bind_casts(py::module_& casts) {
  if (!make_types()) throw py::error_already_set();
  for (auto [name, text] : {std::pair(&OUT, "out"), std::pair(&DTYPE, "dtype")}) {
    *name = owned(PyUnicode_InternFromString(text)).release().ptr();
  }

  casts.def("wrap", &wrap);  // original, reference, rule, rule by Apex's lists -> callable

  // The state behind amp_patch/regions.py, which documents it (`PythonState`).
  casts.def("current", [] {
    const Followed* const here = region_here();
    const Followed& followed = here != nullptr ? *here : everyone();
    return holds(followed.depth, followed.task) ? followed.policy : followed.aside;
  });
  casts.def("begin", [](bool claims) {
    const c10::DispatchKeySet silenced = claims ? native_on() : c10::DispatchKeySet();
    for (const auto key : silenced) c10::impl::tls_set_dispatch_key_excluded(key, true);
    return py::make_tuple(native_depth(), torch::autograd::get_current_graph_task_id(), silenced.raw_repr());
  });
  casts.def("end", [](uint64_t silenced, int depth) {
    if (native_depth() != depth) return;
    for (const auto key : c10::DispatchKeySet(c10::DispatchKeySet::RAW, silenced)) {
      c10::impl::tls_set_dispatch_key_excluded(key, false);
    }
  });
  casts.def("follow", [](const py::object& policy, const py::object& aside, bool caches, int depth, int task) {
    Followed followed = follow_policy(policy, aside, depth, task);
    Thread& thread = this_thread != nullptr ? *this_thread : make_thread();
    thread.inside = true;
    thread.caches = caches;
    std::swap(thread.followed, followed);  // the earlier policy dies here, when all is said
  });
  casts.def("leave", [] {
    if (this_thread == nullptr) return;
    this_thread->inside = this_thread->caches = false;
    const Followed gone = std::exchange(this_thread->followed, {});
    this_thread->clear();
  });
  casts.def("set_default", [](const py::object& policy, const py::object& aside) {
    Followed followed = follow_policy(policy, aside);
    everyones_acting = followed.acting;
    std::swap(everyone(), followed);
  });
  casts.def("cast_weight", [](const py::object& weight, ScalarType dtype) {
    if (!is_tensor(weight.ptr())) throw py::type_error("cast_weight: wanted a tensor");
    const at::Tensor& tensor = THPVariable_Unpack(weight.ptr());
    return may_remember(weight.ptr(), tensor) ? cast_weight(weight.ptr(), tensor, dtype) : cast(weight.ptr(), dtype);
  });
  casts.def("drop_cache", [] {
    if (this_thread != nullptr) this_thread->clear();
  });
  casts.def("cached", [] { return this_thread == nullptr ? size_t(0) : this_thread->casts.size(); });
}

}  // namespace amp_patch

// The callable that replaces each of torch's functions while casts are installed (amp_patch/casts/). It implements the
// frequent rules in C++ and calls the Python wrapper of the same function for all others. The end of the file defines
// amp_patch._C.casts, the names that Python sees.
#include "rules.h"
// Python's own header comes first, by way of rules.h: the headers below need it.
#include <c10/util/SmallVector.h>
#include <structmember.h>
#include <torch/csrc/Exceptions.h>

namespace amp_patch {
namespace [[gnu::visibility("hidden")]] casts {

void bind_emulation(py::module_& m);  // emulation.cpp
void bind_formats(py::module_& m);    // formats.cpp

namespace {

// ---------------------------------------------------------------------------------------------------------------------
// The matrix products, called directly from C++: the casts of their operands need no Python object, and no arguments
// are parsed. Both together save more time than the call through a wrapper takes.

using Product = at::Tensor (*)(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias);

struct Known {
  const char *owner, *name;  // torch keeps the function as torch._C.<owner>.<name>
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

// The entry of `original` in the table, or null. Only torch's own function has an entry; if user code has replaced the
// function, the replacement is called like any other.
const Known* known_product(const py::object& original) {
  const py::object torch = py::module_::import("torch._C");
  for (const Known& known : KNOWN) {
    if (py::getattr(torch.attr(known.owner), known.name, py::none()).is(original)) return &known;
  }
  return nullptr;
}

bool is_operand(PyObject* object) {
  return is_plain(object) && THPVariable_Unpack(object).layout() == at::kStrided;  // sparse ones go to Python
}

bool are_operands(const Arguments& given, bool takes_bias) {
  const Py_ssize_t size = given.positional();
  if (given.names != nullptr || (size != 2 && !(takes_bias && size == 3))) return false;
  return is_operand(given.values[0]) && is_operand(given.values[1]) &&
         (size == 2 || given.values[2] == Py_None || is_operand(given.values[2]));
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

// ---------------------------------------------------------------------------------------------------------------------
// The callables

// One patched function: `original` with casts. It binds as a Python function does. A builtin does not bind: if the
// original is one, Python sees a new builtin whose `__self__` is the Wrapper.
struct Wrapper {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* original;
  PyObject* reference;  // the Python wrapper of the same function; it has the attributes
  PyObject* weak_references;
  PyMethodDef definition;        // for the new builtin: name and docstring of the original
  const Rule *rule, *apex_rule;  // by torch's lists, and by Apex's; null: only Python has the rule
  const Known* known;            // null if the function is no product
  objobjargproc assign;          // the slot behind a type's own `__setitem__`; else null
};

PyTypeObject WrapperType = {PyVarObject_HEAD_INIT(nullptr, 0)};

Wrapper* wrapper(PyObject* self) { return reinterpret_cast<Wrapper*>(self); }

// The arguments of a call after the cast.
struct Casted {
  c10::SmallVector<PyObject*, 12> values;  // with a first slot that vectorcall may overwrite
  c10::SmallVector<py::object, 4> made;    // keeps the casts alive

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

// Calls the original without casts. `__setitem__` of a type is called by its slot: it has no vectorcall, and a call as
// an object would make and parse a tuple.
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

bool is_product(const Rule* rule) { return rule != nullptr && rule->decide == &product; }

// Calls a patched function.
PyObject* vectorcall(PyObject* self, PyObject* const* values, size_t flagged, PyObject* names) {
  const Wrapper& called = *wrapper(self);
  const Arguments given{values, flagged, names};
  const Acting now = acting();
  const Rule* const rule = now.apex ? called.apex_rule : called.rule;
  if (!now.on || (now.products_alone && !is_product(rule))) return call_original(called, given);
  if (called.known != nullptr && !now.low_bit && are_operands(given, called.known->takes_bias)) {
    return multiply(called.known->product, given, {now.low, true});
  }
  Cast cast{};
  switch (route(rule, now, given, cast)) {
    case Route::python:
      return given.call(called.reference);
    case Route::cast:
      return call_with_casts(called.original, given, cast);
    default:
      return call_original(called, given);
  }
}

// Calls the Wrapper of a patched builtin, for which Python sees a new builtin: `self` is its `__self__`, the Wrapper.
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

// Getters of `__doc__` and `__module__`: they read the reference, the Python wrapper. Without them `get_attribute`
// finds the type's own attributes of these names, which every type has, and does not read the reference.
PyObject* of_reference(PyObject* self, void* name) {
  return PyObject_GetAttrString(wrapper(self)->reference, static_cast<const char*>(name));
}

// torch.jit compiles only objects that `inspect.isfunction` accepts (through `__prepare_scriptable__`).
PyObject* apparent_class(PyObject* self, void*) {
  PyTypeObject* type = PyFunction_Check(wrapper(self)->original) ? &PyFunction_Type : Py_TYPE(self);
  return Py_NewRef(reinterpret_cast<PyObject*>(type));
}

// For a function, returns its global name as a string. The pickle of a builtin is "attribute `name` of `__self__`": so
// for a builtin this returns an object with that attribute, the reference, which is pickled by the address where it is
// installed.
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

// There is no tp_clear. A reference cycle through a wrapper also passes through the attributes of its `reference`, and
// the garbage collector breaks it there.
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

bool make_wrapper_type() {
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
  return PyType_Ready(&WrapperType) == 0;
}

// Makes the C form of `reference`, the Python wrapper of `original`: a builtin for a builtin, else a callable that
// binds.
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
  if (is_product(made->rule) && is_product(made->apex_rule)) made->known = known_product(original);
  if (!PyCFunction_Check(original.ptr())) return result;

  const PyMethodDef& found = *reinterpret_cast<PyCFunctionObject*>(original.ptr())->m_ml;
  auto* const function = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&builtin));
  made->definition = {found.ml_name, function, METH_FASTCALL | METH_KEYWORDS, found.ml_doc};
  const py::object module = py::getattr(original, "__module__", py::none());
  return owned(PyCFunction_NewEx(&made->definition, result.ptr(), module.is_none() ? nullptr : module.ptr()));
}

// The functions that `PythonState` in amp_patch/casts/ documents, under the same names.
void bind_state(py::module_& m) {
  m.def("current", [] {
    const Followed* const here = region_here();
    const Followed& followed = here != nullptr ? *here : everyone();
    return holds(followed.depth, followed.task) ? followed.policy : py::object(py::none());
  });
  m.def("emulated", [] {
    const int type = emulated_type();
    return type == -1 ? std::nullopt : std::optional(ScalarType(type));
  });
  m.def("begin", [](bool disables_torch_autocast) {
    // Not const: torch 2.6's raw_repr() is not.
    c10::DispatchKeySet disabled = disables_torch_autocast ? native_on() : c10::DispatchKeySet();
    for (const auto key : disabled) c10::impl::tls_set_dispatch_key_excluded(key, true);
    return py::make_tuple(native_depth(), torch::autograd::get_current_graph_task_id(), disabled.raw_repr());
  });
  m.def("end", [](uint64_t disabled, int depth) {
    if (native_depth() != depth) return;
    for (const auto key : c10::DispatchKeySet(c10::DispatchKeySet::RAW, disabled)) {
      c10::impl::tls_set_dispatch_key_excluded(key, false);
    }
  });
  m.def("follow", [](const py::object& policy, const py::object& emulated, bool caches, int depth, int task) {
    Followed followed = follow_policy(policy, emulated, depth, task);
    Thread& thread = this_thread != nullptr ? *this_thread : make_thread();
    thread.inside = true;
    thread.caches = caches;
    std::swap(thread.followed, followed);  // frees the earlier policy last: its finalizer may run Python code
  });
  m.def("leave", [] {
    if (this_thread == nullptr) return;
    this_thread->inside = this_thread->caches = false;
    const Followed gone = std::exchange(this_thread->followed, {});
    this_thread->clear();
  });
  m.def("set_default", [](const py::object& policy, const py::object& emulated) {
    Followed followed = follow_policy(policy, emulated);
    everyones_acting = followed.acting;
    everyones_emulated = followed.emulated;
    std::swap(everyone(), followed);
  });
  m.def("cast_weight", [](const py::object& weight, ScalarType dtype) {
    if (!is_tensor(weight.ptr())) throw py::type_error("cast_weight: wanted a tensor");
    const at::Tensor& tensor = THPVariable_Unpack(weight.ptr());
    return may_remember(weight.ptr(), tensor) ? cast_weight(weight.ptr(), tensor, dtype) : cast(weight.ptr(), dtype);
  });
  m.def("drop_cache", [] {
    if (this_thread != nullptr) this_thread->clear();
  });
  m.def("cached", [] { return this_thread == nullptr ? size_t(0) : this_thread->casts.size(); });
}

// The names of the rules in the table, a frozenset: the rules that C++ implements.
py::frozenset rule_names() {
  py::set names;
  for (const Rule& rule : RULES) names.add(rule.name);
  return py::frozenset(names);
}

}  // namespace
}  // namespace casts

void bind_casts(py::module_& m) {
  using namespace casts;
  if (!make_forget_type() || !make_wrapper_type() || !make_names()) throw py::error_already_set();
  m.attr("rules") = rule_names();
  m.def("wrap", &wrap);  // original, reference, rule, rule by Apex's lists -> callable
  bind_state(m);
  bind_emulation(m);
  bind_formats(m);
}

}  // namespace amp_patch

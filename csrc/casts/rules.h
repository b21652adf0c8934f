// The cast rules that are implemented in C++: each decides on the casts of one call. amp_patch/casts/rules.py has all
// rules in Python, and oplists.py describes them. A call under a rule that is missing in the table here goes to the
// Python wrapper.
#pragma once

#include "state.h"

namespace amp_patch {
namespace [[gnu::visibility("hidden")]] casts {

// ---------------------------------------------------------------------------------------------------------------------
// The arguments of one call

constexpr int DEEP = 16;  // levels of containers; deeper containers (a list that contains itself) are left to Python

inline bool is_sequence(PyObject* object) { return PyList_Check(object) || PyTuple_Check(object); }

// Calls `see` with every tensor in `object`, also in lists and tuples. Returns false if Python must handle the object.
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

// The cast of a call's arguments: FP16, BF16 and FP32 tensors become `to`. float64, integer, complex and 8-bit
// tensors are never touched.
struct Cast {
  ScalarType to;
  bool remembers;  // casts of FP32 weights are cached in the thread's table

  enum class Found { nothing, something, unusual };

  bool casts(ScalarType type) const { return type != to && is_narrow(type); }

  // Tells whether `object` contains a tensor to cast. It may be a tensor, or a list or tuple of tensors or of such
  // sequences; torch's functions take nothing else. A sequence whose first item is of another kind is not searched.
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

  // Returns `object` with its tensors cast. `look` has returned Found::something for it.
  py::object operator()(PyObject* object, int depth = 0) const {
    if (!is_sequence(object)) {
      const at::Tensor& tensor = THPVariable_Unpack(object);
      return remembers && may_remember(object, tensor) ? cast_weight(object, tensor, to) : cast(object, to);
    }
    if (depth == DEEP) {  // `look` stops at the first tensor to cast; a later list may contain itself
      PyErr_SetString(PyExc_RecursionError, "the arguments hold lists in lists without end");
      throw py::error_already_set();
    }
    auto items = owned(PySequence_List(object));  // a copy: another thread may change the caller's
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items.ptr()); ++i) {
      PyObject* item = PyList_GET_ITEM(items.ptr(), i);
      if (look(item) != Found::something) continue;
      py::object result = (*this)(item, depth + 1);
      PyList_SetItem(items.ptr(), i, result.release().ptr());  // cannot fail: i is in range, the list is ours
    }
    return PyList_Check(object) ? items : owned(PyList_AsTuple(items.ptr()));
  }

  // Returns a plain tensor, cast if necessary, without a Python object for the cast.
  at::Tensor of_plain(PyObject* object) const {
    const at::Tensor tensor = THPVariable_Unpack(object);
    if (!casts(tensor.scalar_type())) return tensor;
    if (remembers && may_remember(object, tensor)) return THPVariable_Unpack(cast_weight(object, tensor, to).ptr());
    return cast(tensor, to);
  }
};

// The arguments of a vectorcall; the values of keywords follow the positional arguments.
struct Arguments {
  PyObject* const* values;
  size_t flagged;   // the number of positional arguments, with vectorcall's flag
  PyObject* names;  // the names of keywords, a tuple; null if there are none

  Py_ssize_t positional() const { return PyVectorcall_NARGS(flagged); }
  Py_ssize_t size() const { return positional() + (names == nullptr ? 0 : PyTuple_GET_SIZE(names)); }

  // Returns the value of a keyword; null if it is missing or None.
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

inline PyObject *OUT = nullptr, *DTYPE = nullptr;  // the names of two keywords, interned by `make_names`

inline bool make_names() {
  OUT = PyUnicode_InternFromString("out");
  DTYPE = PyUnicode_InternFromString("dtype");
  return OUT != nullptr && DTYPE != nullptr;
}

// The floating types of a call and the type that they promote to. As in torch's own promotion, tensors without
// dimensions count only if all tensors have none.
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

  // Adds all arguments of a call. Returns false if Python must handle one of them.
  bool add_all(const Arguments& given) {
    const auto see = [&](PyObject*, const at::Tensor& tensor) { add(tensor); };
    for (Py_ssize_t i = 0; i < given.size(); ++i) {
      if (!each_tensor(given.values[i], see)) return false;
    }
    return true;
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// The rules. Each decides on one call while casts act: cast the arguments (`Route::cast`, to the type in `cast`), or
// route the call to the original or to Python. No Python code runs here.

enum class Route { original, python, cast };

using Decide = Route (*)(const Acting& acting, const Arguments& given, Cast& cast);

inline Route leave(const Acting&, const Arguments&, Cast&) { return Route::original; }

inline Route to_low(const Acting& acting, const Arguments& given, Cast& cast) {
  for (Py_ssize_t i = 0; i < given.size(); ++i) {
    PyObject* value = given.values[i];
    if (is_tensor(value) && THPVariable_Unpack(value).layout() != at::kStrided) return Route::python;
  }
  cast = {acting.low, true};
  return Route::cast;
}

inline Route product(const Acting& acting, const Arguments& given, Cast& cast) {
  return acting.low_bit ? Route::python : to_low(acting, given, cast);
}

inline Route to_fp32(const Acting&, const Arguments& given, Cast& cast) {
  if (given.keyword(DTYPE) != nullptr) return Route::original;  // an explicit type is the user's choice
  cast = {ScalarType::Float, false};
  return Route::cast;
}

inline Route norm(const Acting& acting, const Arguments& given, Cast& cast) {
  return acting.low_norms ? Route::python : to_fp32(acting, given, cast);
}

inline Route sigmoid(const Acting& acting, const Arguments& given, Cast& cast) {
  return acting.allows_banned ? to_fp32(acting, given, cast) : Route::original;
}

inline Route to_widest(const Acting&, const Arguments& given, Cast& cast) {
  Widest widest;
  if (!widest.add_all(given)) return Route::python;
  if (!widest.mixed) return Route::original;
  cast = {widest.dimensioned ? *widest.dimensioned : *widest.all, false};
  return Route::cast;
}

inline Route mixed_to_fp32(const Acting&, const Arguments& given, Cast& cast) {
  Widest widest;
  if (!widest.add_all(given)) return Route::python;
  if (!widest.mixed) return Route::original;
  if (*widest.all == ScalarType::Double) return Route::python;  // the rule in Python raises the error
  cast = {*widest.all, false};  // FP32, the narrowest type that two different types promote to
  return Route::cast;
}

inline Route to_type_of_self(const Acting&, const Arguments& given, Cast& cast) {
  if (given.positional() == 0 || !is_tensor(given.values[0])) return Route::python;
  cast = {THPVariable_Unpack(given.values[0]).scalar_type(), false};
  return is_narrow(cast.to) || cast.to == ScalarType::Double ? Route::cast : Route::original;
}

// ---------------------------------------------------------------------------------------------------------------------
// The table

struct Rule {
  const char* name;  // as in amp_patch/casts/oplists.py and rules.py
  Decide decide;
};

inline constexpr Rule RULES[] = {
    {"none", &leave},  // the call is made unchanged
    {"lower", &to_low},
    {"product", &product},
    {"fp32", &to_fp32},
    {"norm", &norm},
    {"sigmoid", &sigmoid},
    {"widest", &to_widest},
    {"mixed_fp32", &mixed_to_fp32},
    {"match_self", &to_type_of_self},
};

// The rule of that name; null for a rule that only Python has.
inline const Rule* rule_named(const std::string& name) {
  for (const Rule& rule : RULES) {
    if (name == rule.name) return &rule;
  }
  return nullptr;
}

// Returns the route of a call under `rule` (null: a rule that only Python has). For `Route::cast`, also sets `cast`.
inline Route route(const Rule* rule, const Acting& acting, const Arguments& given, Cast& cast) {
  if (rule == nullptr) return Route::python;
  if (given.keyword(OUT) != nullptr) return Route::original;
  const Route decided = rule->decide(acting, given, cast);
  if (decided != Route::cast) return decided;
  Route way = Route::original;
  for (Py_ssize_t i = 0; i < given.size(); ++i) {
    const auto found = cast.look(given.values[i]);
    if (found == Cast::Found::unusual) return Route::python;
    if (found == Cast::Found::something) way = Route::cast;
  }
  return way;
}

}  // namespace casts
}  // namespace amp_patch

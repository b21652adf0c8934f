"""The wrappers that replace torch's functions while casts are installed: C callables, or Python functions."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from amp_patch.casts.rules import PRODUCT, RULES, Rule
from amp_patch.casts.state import PythonState, current, state
from amp_patch.policy import Policy


def backend() -> str:
    """Return the kind of wrapper that `install` makes: ``"cpp"`` if the extension is built, else ``"python"``.

    With "cpp" a C callable replaces the function. It implements the frequent rules in a tenth of the time, and calls
    the Python wrapper for all others.

    ``AMP_PATCH_BACKEND=torch`` in the environment selects Python here, as it selects plain torch in `multi_tensor`.
    """
    return "python" if isinstance(state(), PythonState) else "cpp"


# ---------------------------------------------------------------------------------------------------------------------
# The wrapped functions, for `explain` and for the casts inside torch.compile.


class Wrapped:
    """A function or method behind a wrapper, with its rule in torch's lists and its rule in Apex's."""

    __slots__ = ("apex_rule", "original", "rule")

    def __init__(self, original: Any, rule: str, apex_rule: str) -> None:
        self.original, self.rule, self.apex_rule = original, RULES[rule], RULES[apex_rule]

    def rule_of(self, policy: Policy | None) -> Rule | None:
        """Return the rule of a call while `policy` acts; None: the call is made unchanged."""
        if policy is None:
            return None
        rule = self.apex_rule if policy.op_lists == "apex" else self.rule
        if rule.name == "none" or not (policy.patch_torch_functions or rule.name == PRODUCT):
            return None
        return rule


by_id: dict[int, tuple[Any, Wrapped]] = {}  # id of a wrapper -> (the wrapper: a reference keeps the id unique, entry)
tensor_methods: dict[str, Wrapped] = {}  # name -> entry, of wrappers that are attributes of torch.Tensor now
own_tensor_methods: set[Any] = set()  # torch.Tensor's own methods that a wrapper ever replaced


def register_wrapper(owner: Any, name: str, wrapper: Any, original: Any, rule: str, apex_rule: str) -> None:
    """Record that `wrapper` replaces `original` at `owner.name`."""
    wrapped = Wrapped(original, rule, apex_rule)
    by_id[id(wrapper)] = wrapper, wrapped
    if owner is torch.Tensor:
        tensor_methods[name] = wrapped
        if isinstance(original, (types.MethodDescriptorType, types.WrapperDescriptorType)):
            own_tensor_methods.add(original)


def wrapped_by(wrapper: Any) -> Wrapped | None:
    """Return the entry of the function behind `wrapper`; None if `wrapper` is not a wrapper."""
    return by_id.get(id(wrapper), (None, None))[1]


# ---------------------------------------------------------------------------------------------------------------------
# Wrappers.


class CastFunction(staticmethod):
    """A wrapper that does not bind as a method, like the builtin behind it: `class A: act = torch.exp` works.

    It subclasses staticmethod because Python calls a staticmethod without an extra frame. Copying returns the same
    object. A pickle contains the function's address in torch; loading it returns the object at that address, a wrapper
    or torch's function. The pickle of a decorated function contains the decorator and the original.
    """

    def __init__(self, call: Callable[..., Any], original: Callable[..., Any], reduced: tuple[Any, ...]) -> None:
        super().__init__(call)
        vars(self).update(_original=original, _reduced=reduced)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return vars(self)["_original"]

    def __getattr__(self, name: str) -> Any:
        # An operator of torch.ops has its overloads as attributes: `F.default` must work on the wrapper too.
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(vars(self)["_original"], name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self

    def __copy__(self) -> CastFunction:
        return self

    def __deepcopy__(self, memo: Any) -> CastFunction:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return vars(self)["_reduced"]

    def __repr__(self) -> str:
        return f"<casts of {self.__wrapped__!r}>"


def wrap(original: Any, rule: str, reduced: tuple[Any, ...], apex_rule: str | None = None) -> Any:
    """Return a Python wrapper that calls `original` by `rule` while casts act.

    Under a policy with Apex's op lists it calls by `apex_rule`, if given. The wrapper binds as a method if `original`
    does. `reduced` is the value of `__reduce__` if the wrapper is a `CastFunction`.
    """
    differs = apex_rule is not None and apex_rule != rule
    by_torch, by_apex = RULES[rule], RULES[apex_rule or rule]
    torchs, apexs = by_torch.apply, by_apex.apply
    alone = by_torch.alone
    multiplies = PRODUCT in (by_torch.name, by_apex.name)

    def call(*args: Any, **kwargs: Any) -> Any:
        policy = current()
        if kwargs and kwargs.get("out") is not None:
            return original(*args, **kwargs)
        if policy is None or not (multiplies or policy.patch_torch_functions):
            return original(*args, **kwargs) if alone is None else alone(original, args, kwargs)
        apply = apexs if differs and policy.op_lists == "apex" else torchs
        return apply(original, args, kwargs, policy)

    for name in functools.WRAPPER_ASSIGNMENTS:
        if isinstance(value := getattr(original, name, None), (str, dict)):
            setattr(call, name, value)
    if isinstance(original, types.FunctionType) or (
        hasattr(type(original), "__get__") and not isinstance(original, (types.MethodType, CastFunction))
    ):
        vars(call).update(getattr(original, "__dict__", {}), __wrapped__=original)
        # Without this, torch.jit would compile the source of `call`, which is not TorchScript.
        vars(call)["__prepare_scriptable__"] = lambda: original
        return call
    return CastFunction(call, original, reduced)


_registered: list[Any] = []  # wrappers whose ids are in torch.jit's table, and which do not support weak references


def register_with_jit(wrapper: Any, original: Any) -> None:
    """Let torch.jit.script compile calls of `wrapper` as the builtin `original`, without casts.

    torch.jit identifies a builtin by its id. After the wrapper is freed another object may get that id, so the entry is
    removed then.
    """
    builtins = importlib.import_module("torch.jit._builtins")
    if (operator := builtins._find_builtin(original)) is not None:
        builtins._register_builtin(wrapper, operator)
        table = builtins._get_builtin_table()
        try:
            weakref.finalize(wrapper, table.pop, id(wrapper), None).atexit = False
        except TypeError:  # no weak references: never free the wrapper, so that no object gets its id
            _registered.append(wrapper)


# The types of callable that the C wrappers support. All functions on the op lists have one of them. Users may register
# callables of other types, which get a Python wrapper.
_COMPILED = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


def wrapper_at(owner: Any, name: str, original: Any, rule: str, apex_rule: str) -> Any:
    """Return a wrapper to replace `original` at `owner.name`, of the backend in use."""
    if isinstance(owner, type):
        module, path = owner.__module__, f"{owner.__qualname__}.{name}"
    else:
        module, path = owner.__name__, name
    reduced = (pkgutil.resolve_name, (f"{module}:{path}",))
    if isinstance(original, (staticmethod, classmethod)) and not isinstance(original, CastFunction):
        return type(original)(wrap(original.__func__, rule, reduced, apex_rule))
    wrapper = wrap(original, rule, reduced, apex_rule)
    if isinstance(wrapper, types.FunctionType) and getattr(original, "__module__", None) is None:
        # Methods that torch.Tensor inherits from its C base have no module, and pickle needs an importable address.
        wrapper.__module__, wrapper.__qualname__ = module, path
    # A C wrapper does not serve rules with `for_users` or `alone`: while no casts act it calls the original.
    in_python = RULES[rule].for_users or RULES[rule].alone is not None
    if backend() == "cpp" and isinstance(original, _COMPILED) and not in_python:
        wrapper = state().wrap(original, wrapper, rule, apex_rule)
    if isinstance(original, (types.BuiltinFunctionType, types.FunctionType)):  # torch.jit also treats torch.einsum so
        register_with_jit(wrapper, original)
    return wrapper

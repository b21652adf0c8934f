"""Calls of wrapped functions in code that torch.compile traces: Dynamo traces the wrapper's rule and the original.

All functions here run while Dynamo traces, and use its private names. dynamo.py checks these names and calls them.
"""

from __future__ import annotations

import functools
import importlib
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from amp_patch.casts import traced_regions, wrappers
from amp_patch.casts.in_fp32 import Alone
from amp_patch.casts.rules import Rule
from amp_patch.casts.wrappers import Wrapped
from amp_patch.policy import Policy


class _Tracing(threading.local):
    """The state of the trace on this thread."""

    # Names of the wrapped functions whose rules are being traced now, outermost first. The rule calls the original, and
    # Dynamo must trace that call without the rule. `begin` makes a new list.
    names: list[str] = []  # noqa: RUF012


_tracing = _Tracing()


def begin() -> None:
    """Begin a trace on this thread."""
    _tracing.names = []


def rule_now(entry: Wrapped, name: str) -> Alone | None:
    """Return the function that makes a call of `name` at this point of the trace: (function, args, kwargs) -> result.

    None: the call is traced unchanged.
    """
    if name in _tracing.names:
        return None
    policy = traced_regions.traced()
    rule = entry.rule_of(policy)
    return entry.rule.alone if rule is None or policy is None else _bound(rule, policy)


@functools.cache
def _bound(rule: Rule, policy: Policy) -> Alone:
    apply = rule.apply

    def bound(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return apply(function, args, kwargs, policy)

    return bound


def inline(tx: Any, apply: Alone, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Trace `apply(function, args, kwargs)`."""
    variables = importlib.import_module("torch._dynamo.variables")
    call = _traceable(apply, function)
    _tracing.names.append(function.__name__)
    try:
        return variables.UserFunctionVariable(call).call_function(tx, args, kwargs)
    finally:
        _tracing.names.pop()


@functools.cache
def _traceable(apply: Alone, function: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs and kwargs.get("out") is not None:
            return function(*args, **kwargs)
        return apply(function, args, kwargs)

    return call


def _named(function: Any, name: str) -> Callable[..., Any]:
    """Give `function` a name, and its code too: Dynamo reads the name of the code from torch 2.15 on."""
    function.__name__ = name
    if name != "__setitem__":  # Dynamo refuses code with this name, unless it belongs to a class of user code
        function.__code__ = function.__code__.replace(co_name=name)
    return function


@functools.cache
def method_of(name: str) -> Callable[..., Any]:
    """Return the method `name` as a function that Dynamo can trace."""

    def call(own: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(own, name)(*args, **kwargs)

    return _named(call, name)


@functools.cache
def operator_of(function: Any, name: str) -> Callable[..., Any]:
    """Return `function`, of Python's module `operator`, as a traceable one named `name` as torch.Tensor's method."""

    def call(*args: Any) -> Any:
        return function(*args)

    return _named(call, name)


_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType)

# ---------------------------------------------------------------------------------------------------------------------
# Dynamo's tables of functions and types, extended by the wrappers

_in_table: set[int] = set()  # ids of the wrappers that are in `_table`
_table: dict[Any, Any] | None = None  # Dynamo's rule map; Dynamo replaces it when a process group is initialized


def register_wrappers() -> None:
    """Add the wrappers that are missing in Dynamo's tables."""
    global _table
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    known = rules.get_torch_obj_rule_map()
    if known is not _table:
        _in_table.clear()
        _table = known
    new = [entry for key, entry in wrappers.by_id.items() if key not in _in_table]
    if not new:
        return
    builder = importlib.import_module("torch._dynamo.variables.builder")
    variable = _variable_class()
    operators = importlib.import_module("torch._ops")
    higher_order = importlib.import_module("torch._dynamo.variables").TorchHigherOrderOperatorVariable
    # Traced code reads policies. Without these handlers Dynamo could not treat their fields as constants.
    handlers = builder.SourcelessBuilder._type_handlers
    for kind in (Policy, traced_regions.CastsPolicy):
        handlers.setdefault(kind, lambda tx, value: builder.UserDefinedObjectVariable(value))
    # Up to torch 2.11, Dynamo's own handler of frozen dataclasses builds all fields at once, and fails on a float.
    by_type = builder.VariableBuilder._type_dispatch()
    by_type.setdefault(
        traced_regions.CastsPolicy, lambda own, value: builder.UserDefinedObjectVariable(value, source=own.source)
    )
    by_id = builder.VariableBuilder._id_dispatch()
    for wrapper, entry in new:
        _in_table.add(id(wrapper))
        if isinstance(entry.original, operators.HigherOrderOperator):
            handlers.setdefault(type(entry.original), lambda tx, value: higher_order.make(value))
        if rules.hashable(wrapper) and wrapper in known:  # Dynamo built the rule map while the wrapper was installed
            known[entry.original] = known.pop(wrapper)

        def build(self: Any, value: Any, entry: Wrapped = entry) -> Any:
            self.install_guards(builder.GuardBuilder.ID_MATCH)
            return variable(entry, source=self.source)

        by_id[id(wrapper)] = build
        # A TorchFunctionMode receives a C wrapper of a method as its argument `func`: a value without a source.
        if type(wrapper).__module__ == "amp_patch._C.casts":
            handlers.setdefault(type(wrapper), lambda tx, value: variable(wrappers.by_id[id(value)][1]))
    names = {entry.original.__name__ for _, entry in new if hasattr(entry.original, "__name__")}
    for function in vars(torch.nn.functional).values():
        # Dynamo must trace into functions that call wrapped functions. If such a function were one node of the graph,
        # it would call the wrappers when the graph runs, and no policy acts then.
        if isinstance(function, types.FunctionType) and not names.isdisjoint(function.__code__.co_names):
            known[function] = builder.UserFunctionVariable


@contextmanager
def _inlined(function: Callable[..., Any]) -> Iterator[None]:
    """Let Dynamo trace into `function` inside the block. Torch 2.6 asserts that the rule map allows it."""
    table: dict[Any, Any] = importlib.import_module("torch._dynamo.trace_rules").get_torch_obj_rule_map()
    before = table.get(function)
    table[function] = importlib.import_module("torch._dynamo.variables").UserFunctionVariable
    try:
        yield
    finally:
        if before is None:
            del table[function]
        else:
            table[function] = before


@functools.cache
def _calling(function: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


@functools.cache
def _variable_class() -> type:
    rules = importlib.import_module("torch._dynamo.trace_rules")
    functions = importlib.import_module("torch._dynamo.variables.functions")
    torch_functions: Any = importlib.import_module("torch._dynamo.variables.torch").TorchInGraphFunctionVariable

    class CastFunctionVariable(torch_functions):
        """Dynamo's representation of a wrapper during a trace."""

        def __init__(self, entry: Any, **kwargs: Any) -> None:
            self.entry = entry
            super().__init__(entry.original, **kwargs)

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            original = self.entry.original
            name = getattr(original, "__name__", "")
            if isinstance(original, _METHODS):
                original = method_of(name)
            rule = rule_now(self.entry, name)
            if rule is not None:
                return inline(tx, rule, original, list(args), kwargs)
            if isinstance(original, types.FunctionType) and original.__module__ in ("torch.nn.functional", __name__):
                # Without `_inlined` the function would become one node, and the rules of the calls inside it would not
                # be traced.
                with _inlined(original):
                    return functions.UserFunctionVariable(original).call_function(tx, args, kwargs)
            if not isinstance(original, (types.FunctionType, types.BuiltinFunctionType, *_METHODS)):
                # Dynamo accepts an operator of torch.ops or a higher-order one only as a call inside a function.
                return functions.UserFunctionVariable(_calling(original)).call_function(tx, args, kwargs)
            return rules.lookup(original)(original).call_function(tx, args, kwargs)

    return CastFunctionVariable

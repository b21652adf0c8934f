"""The casts inside torch.compile: what the patched functions do, done while Dynamo traces, as nodes of its graph.

Dynamo cannot look into functions in C, and does not look at what stands in torch.Tensor. So it is told here, the moment
before it traces a frame, how to read them: a call of a function, a method or an operator on the op lists is traced as
its rule (rules.py) for the policy that acts. Regions (regions.py) say which one that is; at the start of a frame it is
the thread's, and a guard has the frame compiled again where another one acts.

This is the one file that needs the inside of Dynamo. Nothing here imports it: `hook` waits until somebody else has.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import logging
import pkgutil
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from amp_patch.casts import regions, traced_regions
from amp_patch.casts import state as casts_state
from amp_patch.casts.rules import EMULATED, RULES
from amp_patch.policy import Policy

logger = logging.getLogger("amp_patch")

_DYNAMO = "torch._dynamo.symbolic_convert"

# What is used of Dynamo's inside. Run with torch 2.13; one that lacks any of it is left alone.
_USED = tuple(
    f"torch._dynamo.{name}"
    for name in (
        *("symbolic_convert:InstructionTranslator.current_tx", "symbolic_convert:InstructionTranslator.set_current_tx"),
        *("symbolic_convert:InstructionTranslator.import_source", "symbolic_convert:InstructionTranslator.run"),
        *("eval_frame:skip_code", "guards:install_guard", "guards:GuardBuilder.ID_MATCH"),
        *("source:AttrSource", "source:CallFunctionNoArgsSource.make_guard"),
        *("trace_rules:add", "trace_rules:get_torch_obj_rule_map", "trace_rules:hashable", "trace_rules:lookup"),
        *("trace_rules:get_tensor_method.cache_clear",),
        *("variables.builder:VariableBuilder._id_dispatch", "variables.builder:VariableBuilder.install_guards"),
        *("variables.builder:SourcelessBuilder._type_handlers", "variables.builder:GuardBuilder.ID_MATCH"),
        *("variables.builder:UserDefinedObjectVariable", "variables.builder:UserFunctionVariable.call_function"),
        *("variables.builtin:BuiltinVariable._handle_insert_op_in_graph",),
        *("variables.builtin:BuiltinVariable.call_function_handler_cache",),
        *("variables.ctx_manager:AutocastModeVariable.create", "variables.ctx_manager:AutocastModeVariable.enter"),
        *("variables.ctx_manager:AutocastModeVariable.exit", "variables.functions:UserFunctionVariable.call_function"),
        *("variables.tensor:TensorVariable.call_method", "variables.torch:TorchInGraphFunctionVariable.call_function"),
    )
)


# What these do to optimizers and gradients is Python's: Dynamo would find nothing there to compile, and try.
_BOOKKEEPING = ("frontend", "masters", "multi_tensor", "recording", "training")


class Wrapped:
    """A function or method with a wrapper in front of it, and its rules by either list."""

    __slots__ = ("apex_rule", "original", "rule")

    def __init__(self, original: Any, rule: str, apex_rule: str) -> None:
        self.original, self.rule, self.apex_rule = original, rule, apex_rule

    def rule_of(self, policy: Policy | None) -> str | None:
        """The name of the rule that a call follows while `policy` acts; None: the call is made as it is."""
        if policy is None:
            return None
        rule = self.apex_rule if policy.op_lists == "apex" else self.rule
        return rule if rule != "none" and (policy.patch_torch_functions or rule in EMULATED) else None


_functions: dict[int, tuple[Any, Wrapped]] = {}  # id of a wrapper -> the wrapper, and what it stands for
_methods: dict[str, Wrapped] = {}  # of torch.Tensor, by name
_own_methods: set[Any] = set()  # of torch.Tensor, those that a wrapper ever stood for
_told: set[int] = set()  # ids of the wrappers that stand in `_table`
_table: dict[Any, Any] | None = None  # Dynamo's, of torch's functions; it makes a new one after a process group began
_hooked = False
_attached = False
_stale = False  # whether there may be frames that were compiled before


def know(owner: Any, name: str, wrapper: Any, original: Any, rule: str, apex_rule: str) -> None:
    """Note that `wrapper` stands at `owner.name`, for when Dynamo meets it."""
    wrapped = Wrapped(original, rule, apex_rule)
    _functions[id(wrapper)] = wrapper, wrapped
    if owner is torch.Tensor:
        _methods[name] = wrapped
        if isinstance(original, (types.MethodDescriptorType, types.WrapperDescriptorType)):
            _own_methods.add(original)


def wrapped_by(wrapper: Any) -> Wrapped | None:
    """What `wrapper` stands for; None if it is no wrapper."""
    return _functions.get(id(wrapper), (None, None))[1]


def forget_methods() -> None:
    """torch.Tensor has its own methods again."""
    _methods.clear()


# ---------------------------------------------------------------------------------------------------------------------
# Whose casts act. A frame is compiled for one answer, and a guard asks `acting` again before it is used.


def acting() -> Policy | None:
    """What the compiled code depends on: one object for all policies whose casts are the same."""
    policy = casts_state.current()
    return None if policy is None else _casts_of(policy)


@functools.lru_cache(maxsize=256)
def _casts_of(policy: Policy) -> Policy:
    return traced_regions.casts_policy(
        policy.dtype, policy.patch_torch_functions, policy.allow_banned, policy.cpu_fp16, policy.op_lists
    )


# ---------------------------------------------------------------------------------------------------------------------
# Hooks into Dynamo


def start_late() -> None:
    """The casts were installed while Dynamo traces a frame, by the first region of the process."""
    if _attached:
        _start(sys.modules[_DYNAMO].InstructionTranslator.current_tx())


def hook() -> None:
    """Be there when Dynamo traces: now if it is imported, else as soon as it is. Idempotent."""
    global _hooked, _stale
    if not _hooked:
        _hooked = True
        if _DYNAMO in sys.modules:
            _attach(sys.modules[_DYNAMO])
            _stale = _attached
        else:
            sys.meta_path.insert(0, _Finder())
    # Frames compiled before ask nobody whose casts act. Dropped in the middle of a trace, they would take its own.
    if _stale and importlib.import_module("torch._guards").TracingContext.try_get() is None:
        _stale = False
        dynamo: Any = sys.modules["torch._dynamo"]
        getattr(dynamo, "reset_code_caches", dynamo.reset)()


class _Finder(importlib.abc.MetaPathFinder):
    """Sees Dynamo being imported, once."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _DYNAMO:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                _attach(module)

            loader.exec_module = exec_module
        return spec


def _unknown(found: object) -> None:
    """Say once that this torch's compiler is not the one that this file was written for."""
    logger.warning(
        "the compiler of torch %s is not known here (%s): the casts of O1, O4 and amp.autocast act in compiled code "
        "only where its graphs break; everything else, eager code above all, is as ever",
        torch.__version__,
        found,
    )


def _attach(module: Any) -> None:
    global _attached
    try:
        for name in _USED:
            pkgutil.resolve_name(name)
        for name in _BOOKKEEPING:
            importlib.import_module("torch._dynamo.trace_rules").add(f"amp_patch.{name}")
        # Called between graphs by regions that begin and end there; in traced code regions never come to these.
        for function in vars(casts_state.PythonState).values():
            if isinstance(function, types.FunctionType):
                importlib.import_module("torch._dynamo.eval_frame").skip_code(function.__code__)
    except Exception as error:
        _unknown(repr(error))
        return
    _attached = True
    translator: Any = module.InstructionTranslator
    tensor = importlib.import_module("torch._dynamo.variables.tensor").TensorVariable
    builtin = importlib.import_module("torch._dynamo.variables.builtin").BuiltinVariable
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    started, run, found = translator.__init__, translator.run, rules.get_tensor_method
    call_method, call_operator = tensor.call_method, builtin._handle_insert_op_in_graph

    @functools.wraps(started)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        started(self, *args, **kwargs)
        _start(self)

    @functools.wraps(run)
    def quiet_run(self: Any) -> Any:
        # What the trace and the backend call of torch for themselves, and the Python inside of a graph's nodes, is not
        # to be cast: the casts are nodes by themselves.
        with regions.region(None):
            return run(self)

    @functools.wraps(call_method)
    def cast_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        wrapped = _methods.get(name)
        if wrapped is not None and (rule := _rule_now(wrapped, name)) is not None:
            return _inline(tx, rule, _method(name), [self, *args], kwargs)
        return call_method(self, tx, name, args, kwargs)

    @functools.wraps(call_operator)
    def cast_operator(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(self.fn, "__name__", "").strip("_")
        name = f"__{name}__" if args and isinstance(args[0], tensor) else f"__r{name}__"
        wrapped = _methods.get(name)
        if wrapped is not None and (rule := _rule_now(wrapped, name)) is not None:
            return _inline(tx, rule, _operator(self.fn, name), list(args), kwargs)
        return call_operator(self, tx, args, kwargs)

    @functools.wraps(found)
    def tensor_methods() -> frozenset[Any]:
        # Dynamo looks once what torch.Tensor has. Behind wrappers are methods too, and when those are gone.
        return found() | _own_methods

    tensor_methods.cache_clear = found.cache_clear  # type: ignore[attr-defined]
    rules.get_tensor_method = tensor_methods
    builtin.call_function_handler_cache.clear()  # it may hold the original
    translator.__init__, translator.run = __init__, quiet_run
    tensor.call_method, builtin._handle_insert_op_in_graph = cast_method, cast_operator


class _Inside(threading.local):
    """The calls that the trace on this thread is in the middle of, by name: they are cast already."""

    names: list[str] = []  # noqa: RUF012  begun anew for each trace
    emulated = False  # whether the trace has emulated FP16 in it


_inside = _Inside()


def _start(tx: Any) -> None:
    """Dynamo is about to trace a frame. Whatever fails here must not keep it from compiling."""
    global _attached
    traced_regions.begin_trace(None, None)
    _inside.names, _inside.emulated = [], False
    if not _attached:
        return
    try:
        _tell()
        _guard(tx)
        if tx.output.compiler_fn is not None:
            tx.output.compiler_fn = _quiet_backend(tx.output.compiler_fn)
    except Exception as error:
        _attached = False
        _unknown(repr(error))
        return
    traced_regions.begin_trace(acting(), functools.partial(_without_autocast, tx))


def _guard(tx: Any) -> None:
    """What is compiled for this frame serves only where the same policy acts."""
    guards = importlib.import_module("torch._dynamo.guards")
    source = importlib.import_module("torch._dynamo.source")
    tracing = importlib.import_module("torch._guards").tracing
    with tracing(tx.output.tracing_context), tx.set_current_tx():
        asked = source.CallFunctionNoArgsSource(source.AttrSource(tx.import_source(__name__), "acting"))
        guards.install_guard(asked.make_guard(guards.GuardBuilder.ID_MATCH))


def _without_autocast(tx: Any, kind: str) -> Callable[[], object]:
    """Enter `torch.autocast(kind, enabled=False)` at this point of the trace; calling the result leaves it."""
    variable = importlib.import_module("torch._dynamo.variables.ctx_manager").AutocastModeVariable
    region = variable.create(torch.amp.autocast, [kind], {"enabled": False})
    region.enter(tx)
    return lambda: region.exit(tx)


def _quiet_backend(backend: Any) -> Any:
    """`backend`; what it makes of Dynamo's graph runs without casts: they are nodes of it already."""

    @functools.wraps(backend)
    def compile_quietly(graph: Any, *args: Any, **kwargs: Any) -> Any:
        with _keeping_roundings() if _inside.emulated else nullcontext():
            compiled = backend(graph, *args, **kwargs)
        _give_kernels_back()

        def run(*inputs: Any) -> Any:
            with regions.region(None):
                return compiled(*inputs)

        return functools.update_wrapper(run, compiled, assigned=())

    return compile_quietly


@contextmanager
def _keeping_roundings() -> Iterator[None]:
    """While Inductor compiles in here, it keeps each rounding to FP16, of which emulated FP16 is made.

    Else it takes a rounding and the cast that follows for nothing, and goes on with FP32's number where FP16 is
    infinite. Backward is compiled at once, since the setting is gone when it is asked for.
    """
    options = (
        ("torch._inductor.config", "emulate_precision_casts"),
        ("torch._functorch.config", "force_non_lazy_backward_lowering"),
    )
    with ExitStack() as stack:
        for name, option in options:
            config: Any = importlib.import_module(name)
            if hasattr(config, option):
                stack.enter_context(config.patch({option: True}))
        yield


def _give_kernels_back() -> None:
    """Inductor's code calls torch's functions as it found them when it was imported: wrapped, if that was late.

    A cast of what the code has laid out for itself would be read as what it is not, in forward and in backward.
    """
    kernels = getattr(sys.modules.get("torch._inductor.select_algorithm"), "extern_kernels", None)
    for name, function in list(vars(kernels).items()) if kernels is not None else ():
        if id(function) in _functions:
            setattr(kernels, name, _functions[id(function)][1].original)


def _rule_now(wrapped: Wrapped, name: str) -> str | None:
    return None if name in _inside.names else wrapped.rule_of(traced_regions.traced())


def _inline(tx: Any, rule: str, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Trace `rule(function, args, kwargs, policy)`."""
    variables = importlib.import_module("torch._dynamo.variables")
    policy = traced_regions.traced()
    assert policy is not None
    call = _traceable(rule, function, policy)
    _inside.names.append(function.__name__)
    _inside.emulated = _inside.emulated or policy.emulates
    try:
        return variables.UserFunctionVariable(call).call_function(tx, args, kwargs)
    finally:
        _inside.names.pop()


@functools.cache
def _traceable(rule: str, function: Any, policy: Policy) -> Callable[..., Any]:
    apply = RULES[rule]

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs and kwargs.get("out") is not None:
            return function(*args, **kwargs)
        return apply(function, args, kwargs, policy)

    return call


@functools.cache
def _method(name: str) -> Callable[..., Any]:
    def call(own: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(own, name)(*args, **kwargs)

    call.__name__ = name
    return call


@functools.cache
def _operator(function: Any, name: str) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return function(*args)

    call.__name__ = name
    return call


def _tell() -> None:
    """Tell Dynamo what it does not know yet of our wrappers."""
    global _table
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    known = rules.get_torch_obj_rule_map()
    if known is not _table:
        _told.clear()
        _table = known
    new = [entry for key, entry in _functions.items() if key not in _told]
    if not new:
        return
    builder = importlib.import_module("torch._dynamo.variables.builder")
    variable = _variable_class()
    # Dynamo reads a policy's fields as the constants that they are.
    handlers = builder.SourcelessBuilder._type_handlers
    handlers.setdefault(Policy, lambda tx, value: builder.UserDefinedObjectVariable(value))
    by_id = builder.VariableBuilder._id_dispatch()
    for wrapper, wrapped in new:
        _told.add(id(wrapper))
        if rules.hashable(wrapper) and wrapper in known:  # Dynamo made its table when the wrapper was there
            known[wrapped.original] = known.pop(wrapper)

        def build(self: Any, value: Any, wrapped: Wrapped = wrapped) -> Any:
            self.install_guards(builder.GuardBuilder.ID_MATCH)
            return variable(wrapped, source=self.source)

        by_id[id(wrapper)] = build
        if type(wrapper).__module__ == "amp_patch._C.casts":  # a method, of whose call a TorchFunctionMode is told
            handlers.setdefault(type(wrapper), lambda tx, value: variable(_functions[id(value)][1]))
    names = {wrapped.original.__name__ for _, wrapped in new if hasattr(wrapped.original, "__name__")}
    for function in vars(torch.nn.functional).values():
        # A composite function that is a node of the graph calls its parts by itself: let Dynamo see them.
        if isinstance(function, types.FunctionType) and not names.isdisjoint(function.__code__.co_names):
            known[function] = builder.UserFunctionVariable


@functools.cache
def _variable_class() -> type:
    rules = importlib.import_module("torch._dynamo.trace_rules")
    functions = importlib.import_module("torch._dynamo.variables.functions")
    torch_functions: Any = importlib.import_module("torch._dynamo.variables.torch").TorchInGraphFunctionVariable

    class CastFunctionVariable(torch_functions):
        def __init__(self, wrapped: Any, **kwargs: Any) -> None:
            self.wrapped = wrapped
            super().__init__(wrapped.original, **kwargs)

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            original = self.wrapped.original
            name = getattr(original, "__name__", "")
            if isinstance(original, (types.MethodDescriptorType, types.WrapperDescriptorType)):
                original = _method(name)
            rule = _rule_now(self.wrapped, name)
            if rule is not None:
                return _inline(tx, rule, original, list(args), kwargs)
            if isinstance(original, types.FunctionType) and original.__module__ in ("torch.nn.functional", __name__):
                # As a node of the graph it would call what it calls by itself, and not with the casts of the trace.
                return functions.UserFunctionVariable(original).call_function(tx, args, kwargs)
            return rules.lookup(original)(original).call_function(tx, args, kwargs)

    return CastFunctionVariable

"""The casts inside torch.compile: while Dynamo traces, the casts of patched functions become nodes of its graph.

Dynamo cannot trace the C wrappers, and it ignores replaced attributes of torch.Tensor. So this file makes Dynamo trace
a call of any function, method or operator on the op lists as the function's rule (rules.py) under the acting policy. At
the start of a frame the acting policy is the thread's; inside a traced region (traced_regions.py) it is the region's.
Each compiled frame has a guard on the thread's policy: under another policy Dynamo compiles the frame again.

Only this file and traced_calls.py use Dynamo's private names. Neither imports Dynamo, which is slow: `hook` attaches to
it when other code imports it.
"""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from amp_patch.casts import regions, traced_calls, traced_regions, wrappers
from amp_patch.casts import state as casts_state
from amp_patch.policy import Policy
from amp_patch.support.compiled import is_compiling
from amp_patch.support.imports import when_imported
from amp_patch.support.patches import Installation, Patches

logger = logging.getLogger("amp_patch")

_DYNAMO = "torch._dynamo.symbolic_convert"

# Private names of Dynamo that this file and traced_calls.py use, as of torch 2.13. If a torch lacks one of them,
# nothing is hooked.
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
        *("variables:TorchHigherOrderOperatorVariable.make",),
        *("variables.tensor:TensorVariable.call_method", "variables.torch:TorchInGraphFunctionVariable.call_function"),
    )
)

# Packages that Dynamo skips: their bookkeeping of optimizers and gradients has no tensor operations to compile.
# `never_trace` adds others.
NEVER_TRACED = ["around", "frontend", "masters", "multi_tensor", "storage", "training", "watch", "ways"]

# Modules whose functions Dynamo may inline into a caller's frame, but must not compile as frames of their own. After a
# graph break in a region, the rest of the forward runs as plain Python and calls the wrappers. All wrappers share one
# code object, so if Dynamo compiled them it would recompile that code object for each wrapped function.
_NEVER_ALONE = (
    *("casts.cpu_half", "casts.in_fp32", "casts.lean_loss", "casts.low_bit", "casts.rules"),
    *("casts.state", "casts.thread_state", "casts.upcast", "casts.wrappers", "model.edited_dicts"),
    *("model.forward", "model.joints", "model.kept_module", "model.kept_result", "model.masks", "model.mixed_calls"),
    *("model.of_model", "support.blocks", "support.compiled", "support.tree"),
)
# The exceptions to `_NEVER_ALONE`: functions defined inside these modules' functions wrap users' methods, and Dynamo
# compiles them together with these methods.
_DEFINE_FORWARDS = ("model.forward", "model.kept_module", "support.compiled")

_hooks = Installation(of_process=True)  # `of_process`: `restore` leaves Dynamo hooked
_hooked = False  # whether `_attach` was called, or is registered for the import of Dynamo
_attached = False  # whether all of `_USED` was found
_stale = False  # whether Dynamo may hold frames compiled before `hook`, which have no guard on the acting policy


# ---------------------------------------------------------------------------------------------------------------------
# The acting policy. A frame is compiled for one policy; a guard calls `acting` before each use of the compiled code.


def acting() -> Policy | None:
    """Return the thread's acting policy for the guard. Policies that cast alike give the same object."""
    policy = casts_state.current()
    return None if policy is None else _casts_of(policy)


@functools.lru_cache(maxsize=256)
def _casts_of(policy: Policy) -> Policy:
    return traced_regions.casts_policy(*traced_regions.casts_of(policy))


# ---------------------------------------------------------------------------------------------------------------------
# Hooks into Dynamo


def start_late() -> None:
    """Apply the casts to the rest of this thread's trace: the traced code has just installed the casts."""
    if _attached:
        _start(sys.modules[_DYNAMO].InstructionTranslator.current_tx())


def register_late_wrappers() -> None:
    """If this thread is tracing, register the wrappers that an import in the traced code has just installed."""
    if _attached and is_compiling():
        traced_calls.register_wrappers()


def hook() -> None:
    """Attach to Dynamo now if it is imported, else when other code imports it. Idempotent."""
    global _hooked, _stale
    if not _hooked:
        _hooked = True
        was_there = _DYNAMO in sys.modules
        when_imported(_DYNAMO, _attach)
        _stale = was_there and _attached
    # A reset inside a trace would drop that trace's state too, so stale frames wait for the next `hook`.
    if _stale and importlib.import_module("torch._guards").TracingContext.try_get() is None:
        _stale = False
        dynamo: Any = sys.modules["torch._dynamo"]
        getattr(dynamo, "reset_code_caches", dynamo.reset)()


def _warn_of_another_dynamo(found: object) -> None:
    """Warn that this file does not know the Dynamo of this torch. Called once."""
    logger.warning(
        "the compiler of torch %s is not known here (%s): the casts of O1, O4 and amp.autocast act in compiled code "
        "only after graph breaks; eager code is not affected",
        torch.__version__,
        found,
    )


def never_trace(package: str) -> None:
    """Make Dynamo skip one more package of amp_patch; the package's `__init__` calls this with its path."""
    NEVER_TRACED.append(package)
    if _attached:
        importlib.import_module("torch._dynamo.trace_rules").add(f"amp_patch.{package}")


def _attach(module: Any) -> None:
    """Hook into Dynamo, whose `symbolic_convert` is `module`. If a name of `_USED` is missing, change nothing."""
    global _attached
    try:
        for name in _USED:
            pkgutil.resolve_name(name)
        for name in NEVER_TRACED:
            importlib.import_module("torch._dynamo.trace_rules").add(f"amp_patch.{name}")
        for name in _NEVER_ALONE:
            for code in _codes_of(importlib.import_module(f"amp_patch.{name}"), nested=name not in _DEFINE_FORWARDS):
                importlib.import_module("torch._dynamo.eval_frame").skip_code(code)
    except Exception as error:
        _warn_of_another_dynamo(repr(error))
        return
    _attached = True
    _hooks.install(functools.partial(_follow_traces, translator=module.InstructionTranslator))
    _hooks.add(_follow_calls)


def _codes_of(module: types.ModuleType, nested: bool) -> Iterator[types.CodeType]:
    """Yield the code of the functions and methods of `module`; if `nested`, also of the functions inside them."""
    own = [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]
    methods = [method for value in own if isinstance(value, type) for method in vars(value).values()]
    left = [function.__code__ for function in (*own, *methods) if type(function) is types.FunctionType]
    while left:
        code = left.pop()
        yield code
        left += [const for const in code.co_consts if nested and isinstance(const, types.CodeType)]


def _follow_traces(patches: Patches, translator: Any) -> None:
    """Patch Dynamo's translator: it calls `_start` before it traces a frame, and traces in a region without casts."""
    started, run = translator.__init__, translator.run

    @functools.wraps(started)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        started(self, *args, **kwargs)
        _start(self)

    @functools.wraps(run)
    def run_without_casts(self: Any) -> Any:
        # Without this region Dynamo and the backend, which call torch's functions while they compile, would cast their
        # own tensors. The casts of the traced code become nodes of its graph instead.
        with regions.region(None):
            return run(self)

    patches.set(translator, "__init__", __init__)
    patches.set(translator, "run", run_without_casts)


def _follow_calls(patches: Patches) -> None:
    """Patch Dynamo so that it traces methods and operators of tensors by their rules.

    `traced_calls.register_wrappers` does the same for functions.
    """
    tensor = importlib.import_module("torch._dynamo.variables.tensor").TensorVariable
    builtin = importlib.import_module("torch._dynamo.variables.builtin").BuiltinVariable
    rules: Any = importlib.import_module("torch._dynamo.trace_rules")
    call_method, call_operator, found = tensor.call_method, builtin._handle_insert_op_in_graph, rules.get_tensor_method

    @functools.wraps(call_method)
    def cast_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        entry = wrappers.tensor_methods.get(name)
        if entry is not None and (rule := traced_calls.rule_now(entry, name)) is not None:
            return traced_calls.inline(tx, rule, traced_calls.method_of(name), [self, *args], kwargs)
        return call_method(self, tx, name, args, kwargs)

    @functools.wraps(call_operator)
    def cast_operator(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(self.fn, "__name__", "").strip("_")
        name = f"__{name}__" if args and isinstance(args[0], tensor) else f"__r{name}__"
        entry = wrappers.tensor_methods.get(name)
        if entry is not None and (rule := traced_calls.rule_now(entry, name)) is not None:
            return traced_calls.inline(tx, rule, traced_calls.operator_of(self.fn, name), list(args), kwargs)
        return call_operator(self, tx, args, kwargs)

    @functools.wraps(found)
    def tensor_methods() -> frozenset[Any]:
        # Dynamo caches the set of torch.Tensor's methods. A set cached while wrappers are installed lacks the wrapped
        # originals, which rules call, and which are attributes again after `uninstall`.
        return found() | wrappers.own_tensor_methods

    tensor_methods.cache_clear = found.cache_clear  # type: ignore[attr-defined]
    patches.set(rules, "get_tensor_method", tensor_methods)
    builtin.call_function_handler_cache.clear()  # cached handlers may hold the original method
    patches.set(tensor, "call_method", cast_method)
    patches.set(builtin, "_handle_insert_op_in_graph", cast_operator)


def _start(tx: Any) -> None:
    """Begin the trace of a frame. Errors are logged, not raised: the compilation then continues without casts."""
    global _attached
    traced_regions.begin_trace(None, None)
    traced_calls.begin()
    if not _attached:
        return
    try:
        traced_calls.register_wrappers()
        _guard(tx)
        if tx.output.compiler_fn is not None:
            tx.output.compiler_fn = _backend_without_casts(tx.output.compiler_fn)
    except Exception as error:
        _attached = False
        _warn_of_another_dynamo(repr(error))
        return
    traced_regions.begin_trace(acting(), functools.partial(_without_autocast, tx))


def _guard(tx: Any) -> None:
    """Guard the compiled frame: Dynamo uses it only if `acting` returns the policy of this trace."""
    guards = importlib.import_module("torch._dynamo.guards")
    source = importlib.import_module("torch._dynamo.source")
    tracing = importlib.import_module("torch._guards").tracing
    with tracing(tx.output.tracing_context), tx.set_current_tx():
        asked = source.CallFunctionNoArgsSource(source.AttrSource(tx.import_source(__name__), "acting"))
        guards.install_guard(asked.make_guard(guards.GuardBuilder.ID_MATCH))


def _without_autocast(tx: Any, kind: str) -> Callable[[], object]:
    """Enter `torch.autocast(kind, enabled=False)` at this point of the trace; return a function that leaves it."""
    variable = importlib.import_module("torch._dynamo.variables.ctx_manager").AutocastModeVariable
    region = variable.create(torch.amp.autocast, [kind], {"enabled": False})
    region.enter(tx)
    return lambda: region.exit(tx)


def _backend_without_casts(backend: Any) -> Any:
    """Return `backend`, changed so that its compiled graphs run without casts: their casts are nodes of the graphs.

    Emulation (cpu_half.py) is not a node. So a graph runs with the emulated type of its traced regions; if they have
    none, with the type that is emulated where the graph is called.
    """

    @functools.wraps(backend)
    def compile_without_casts(graph: Any, *args: Any, **kwargs: Any) -> Any:
        emulated = traced_regions.emulated_in_trace()
        compiled = backend(graph, *args, **kwargs)
        _give_kernels_back()

        def run(*inputs: Any) -> Any:
            with regions.region(None, emulated=emulated or casts_state.in_use.emulated()):
                return compiled(*inputs)

        return functools.update_wrapper(run, compiled, assigned=())

    return compile_without_casts


def _give_kernels_back() -> None:
    """Replace the wrappers in Inductor's table `extern_kernels` by torch's own functions.

    Inductor fills the table at its import from attributes of torch, which may be wrappers then. Its compiled code
    relies on the dtype and strides of the functions' results, so it would misread a result that a wrapper has cast.
    """
    kernels = getattr(sys.modules.get("torch._inductor.select_algorithm"), "extern_kernels", None)
    for name, function in list(vars(kernels).items()) if kernels is not None else ():
        if (entry := wrappers.wrapped_by(function)) is not None:
            setattr(kernels, name, entry.original)

"""The casts of O1 as they are used: wrappers in place of torch's functions, regions, decorators, a registry."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch.compiler import is_dynamo_compiling

from amp_patch import compiling, multi_tensor
from amp_patch.cpu_fp16 import settle
from amp_patch.oplists import OPLISTS, rules_by_name
from amp_patch.policy import LOW_PRECISION, Policy
from amp_patch.regions import (
    PythonState,
    as_default,
    as_now,
    current,
    drop_cache,
    entered,
    everywhere,
    region,
    set_default,
    state,
    use_state,
)
from amp_patch.rules import EMULATED, RULES
from amp_patch.support.patches import Patches

__all__ = [
    "autocast",
    "backend",
    "bfloat16_function",
    "current",
    "disable_casts",
    "drop_cache",
    "entered",
    "everywhere",
    "float_function",
    "half_function",
    "install",
    "installed",
    "leave_alone",
    "places",
    "promote_function",
    "region",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "set_default",
    "uninstall",
    "use_backend",
]

# ---------------------------------------------------------------------------------------------------------------------
# Backends: in "cpp" a C callable stands in front of each Python wrapper of the op lists. It does the frequent rules by
# itself, in a tenth of the time, and has the Python wrapper do all others.

BACKENDS = ("cpp", "python")


def backend() -> str:
    """``"cpp"`` or ``"python"``: the wrappers that `install` takes; the first where the extension is there.

    ``AMP_PATCH_BACKEND=torch`` in the environment turns to Python here as it turns to plain torch in `multi_tensor`.
    """
    return "python" if isinstance(state(), PythonState) else "cpp"


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Take the wrappers ``"cpp"`` or ``"python"`` inside the block, in all threads. For tests and benchmarks.

    Raises:
        ValueError: a name that is none of these.
        RuntimeError: there is no extension, or casts are installed (`uninstall` them first).
    """
    if name not in BACKENDS:
        raise ValueError(f"use_backend: {name!r} is none of {', '.join(BACKENDS)}")
    extension = multi_tensor.extension()
    if name == "cpp" and extension is None:
        raise RuntimeError(f"use_backend: {multi_tensor.backend_reason()}")
    if installed():
        raise RuntimeError(f"use_backend: the {backend()} wrappers are installed; call uninstall() first")
    before = state()
    if name != backend():
        use_state(PythonState() if extension is None or name == "python" else extension.casts)
    try:
        yield
    finally:
        uninstall()
        if state() is not before:
            use_state(before)


# ---------------------------------------------------------------------------------------------------------------------
# Wrappers.


class _Function(staticmethod):
    """A wrapper that does not bind as a method, like the builtin that it wraps: `class A: act = torch.exp` works.

    A staticmethod because that is callable at C speed. Copies are the object itself. A pickle holds the address, or
    for a decorated function the decorator and the original, and finds whatever is there when it is loaded.
    """

    def __init__(self, call: Callable[..., Any], original: Callable[..., Any], reduced: tuple[Any, ...]) -> None:
        super().__init__(call)
        vars(self).update(_original=original, _reduced=reduced)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return vars(self)["_original"]

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self

    def __copy__(self) -> _Function:
        return self

    def __deepcopy__(self, memo: Any) -> _Function:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return vars(self)["_reduced"]

    def __repr__(self) -> str:
        return f"<casts of {self.__wrapped__!r}>"


def _wrap(original: Any, rule: str, reduced: tuple[Any, ...], apex_rule: str | None = None) -> Any:
    """`original` with its arguments cast by `rule` while casts act; it binds as a method exactly if `original` does.

    `apex_rule` takes its place under a policy of Apex's lists.
    """
    differs = apex_rule is not None and apex_rule != rule
    torchs, apexs = (RULES[rule], rule in EMULATED), (RULES[apex_rule or rule], (apex_rule or rule) in EMULATED)

    def call(*args: Any, **kwargs: Any) -> Any:
        policy = current()
        if policy is None or (kwargs and kwargs.get("out") is not None):
            return original(*args, **kwargs)
        apply, emulated = apexs if differs and policy.op_lists == "apex" else torchs
        if not (policy.patch_torch_functions or emulated):  # what acts is only the emulation of FP16 on a CPU
            return original(*args, **kwargs)
        return apply(original, args, kwargs, policy)

    for name in functools.WRAPPER_ASSIGNMENTS:
        if isinstance(value := getattr(original, name, None), (str, dict)):
            setattr(call, name, value)
    if isinstance(original, types.FunctionType) or (
        hasattr(type(original), "__get__") and not isinstance(original, (types.MethodType, _Function))
    ):
        vars(call).update(getattr(original, "__dict__", {}), __wrapped__=original)
        # torch.jit compiles the source of what it meets, and that of `call` is not in its language.
        vars(call)["__prepare_scriptable__"] = lambda: original
        return call
    return _Function(call, original, reduced)


def _register_with_jit(wrapper: Any, original: Any) -> None:
    """Let torch.jit.script see the operator behind a wrapped builtin (it runs there without casts)."""
    builtins = importlib.import_module("torch.jit._builtins")
    if (operator := builtins._find_builtin(original)) is not None:
        builtins._register_builtin(wrapper, operator)


# ---------------------------------------------------------------------------------------------------------------------
# Installation. The one process-wide state besides the default policy, because torch's namespace is process-wide.

_lock = threading.RLock()
_patches: Patches | None = None
_installed: set[str] = set()  # which op lists, while installed
# (id of the owner, name) -> the owner, and what a wrapper replaced there, while installed
_originals: dict[tuple[int, str], tuple[Any, Any]] = {}
_wrappers: dict[tuple[int, str, str, str], tuple[Any, Any]] = {}  # (id of the original, rules, backend) -> both
_registered: dict[tuple[int, str], tuple[Any, str, str]] = {}  # the user's: (owner, name, rule)


def install(op_lists: str = "torch") -> None:
    """Replace the functions on the op lists, and the user's registered ones, by their wrappers. Idempotent.

    ``"apex"`` also replaces those that only Apex's lists have (arithmetic, comparisons): a policy with that `op_lists`
    needs them, and a process without one does not pay for them. Without a policy (`region`, `set_default`) the wrappers
    call straight through. If anything fails, nothing is replaced. A name that this torch does not have is left out.
    """
    global _patches
    if op_lists in _installed:
        compiling.hook()
        return
    with _lock:
        if op_lists in _installed:
            return
        patches = _patches or Patches()
        torchs, apexs = rules_by_name("torch"), rules_by_name("apex")
        try:
            for address, name in rules_by_name(op_lists):
                if _patches is not None and (address, name) in torchs:
                    continue
                owner = _resolve(address)
                # What the user registered takes the place of the lists.
                if hasattr(owner, name) and (id(owner), name) not in _registered:
                    key = address, name
                    _replace(patches, owner, name, torchs.get(key, "none"), apexs[key])
            if _patches is None:
                _keep_regions_in_checkpoints(patches)
                _keep_default_in_replicas(patches)
                for owner, name, rule in _registered.values():
                    _replace(patches, owner, name, rule, rule)
        except BaseException:
            patches.remove()
            _forget_installation()
            raise
        compiling.hook()
        _patches = patches
        _installed.update(("torch", op_lists))


def uninstall() -> None:
    """Put back every attribute that `install` replaced: the very objects, inherited ones inherited again."""
    with _lock:
        if _patches is not None:
            try:
                _patches.remove()
            finally:
                _forget_installation()


def _forget_installation() -> None:
    global _patches
    _patches = None
    compiling.forget_methods()
    _originals.clear()
    _installed.clear()


def installed() -> bool:
    """Whether torch's functions are replaced by wrappers now."""
    return _patches is not None


def _keep_regions_in_checkpoints(patches: Patches) -> None:
    """Let activation checkpointing compute again under the casts of the first time, as it does with torch.autocast.

    Backward runs after the regions of the forward, or in the one of `scale_loss`: without `disable_casts` and modules
    kept in FP32 inside. The two functions below are what `torch.utils.checkpoint.checkpoint`, which users import by
    name, looks up when it is called: they take what is to be called again.
    """

    def wrap(original: Callable[..., Any], index: int) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return original(*args[:index], as_now(args[index]), *args[index + 1 :], **kwargs)

        return call

    owner = torch.utils.checkpoint
    if (generator := getattr(owner, "_checkpoint_without_reentrant_generator", None)) is not None:
        patches.set(owner, generator.__name__, wrap(generator, 0))
    reentrant = owner.CheckpointFunction
    patches.set(reentrant, "forward", staticmethod(wrap(reentrant.forward, 1)))


def _keep_default_in_replicas(patches: Patches) -> None:
    """Let the process default hold in DataParallel's threads.

    Each of them enters torch.autocast to be as the caller's is. Where that is off, it is nobody's word.
    """
    parallel_apply = torch.nn.DataParallel.parallel_apply

    @functools.wraps(parallel_apply)
    def under_default(self: Any, replicas: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled():
            replicas = [as_default(replica) for replica in replicas]
        return parallel_apply(self, replicas, *args, **kwargs)

    patches.set(torch.nn.DataParallel, "parallel_apply", under_default)


def in_force(function: Any) -> Any:
    """What the casts have put in the place of `function`, by whose own name torch has it now; else `function` itself.

    For a function that was taken from torch's namespace before they were installed.
    """
    owner = sys.modules.get(getattr(function, "__module__", None) or "")
    found = getattr(owner, getattr(function, "__name__", ""), None)
    original = getattr(found, "__wrapped__", None) or getattr(getattr(found, "__self__", None), "__wrapped__", None)
    return found if original is function else function


def _resolve(address: str) -> Any:
    module, _, rest = address.partition(".")
    owner: Any = importlib.import_module(module)
    for name in rest.split(".") if rest else ():
        owner = getattr(owner, name)
    return owner


def _at(owner: Any, name: str) -> Any:
    return inspect.getattr_static(owner, name, None) if isinstance(owner, type) else getattr(owner, name)


class Place(NamedTuple):
    """Where a wrapper stands: `owner.name`; by `register_half_function` and its siblings if `registered`."""

    owner: Any
    name: str
    wrapper: Any
    wrapped: compiling.Wrapped
    registered: bool


def places() -> list[Place]:
    """Where wrappers stand now."""
    found = [(owner, name, _at(owner, name)) for (_, name), (owner, _) in list(_originals.items())]
    return [
        Place(owner, name, wrapper, wrapped, (id(owner), name) in _registered)
        for owner, name, wrapper in found
        if (wrapped := compiling.wrapped_by(wrapper)) is not None  # else somebody has put another thing there
    ]


def _replace(patches: Patches, owner: Any, name: str, rule: str, apex_rule: str) -> None:
    found = _at(owner, name)
    _, original = _originals.setdefault((id(owner), name), (owner, found))
    key = (id(original), rule, apex_rule, backend())
    if key not in _wrappers:
        _wrappers[key] = (original, _wrapper_at(owner, name, original, rule, apex_rule))
    wrapper = _wrappers[key][1]
    patches.set(owner, name, wrapper)
    compiling.know(owner, name, wrapper, original, rule, apex_rule)


# What the op lists name. Functions that users hand in are left to Python, which keeps all that they may be.
_COMPILED = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


def _wrapper_at(owner: Any, name: str, original: Any, rule: str, apex_rule: str) -> Any:
    if isinstance(owner, type):
        module, path = owner.__module__, f"{owner.__qualname__}.{name}"
    else:
        module, path = owner.__name__, name
    reduced = (pkgutil.resolve_name, (f"{module}:{path}",))
    if isinstance(original, (staticmethod, classmethod)) and not isinstance(original, _Function):
        return type(original)(_wrap(original.__func__, rule, reduced, apex_rule))
    wrapper = _wrap(original, rule, reduced, apex_rule)
    if isinstance(wrapper, types.FunctionType) and getattr(original, "__module__", None) is None:
        # A method that torch.Tensor inherits from its C base: give it an address where it can be found, for pickle.
        wrapper.__module__, wrapper.__qualname__ = module, path
    if backend() == "cpp" and isinstance(original, _COMPILED) and not rule.startswith("user_"):
        wrapper = state().wrap(original, wrapper, rule, apex_rule)
    if isinstance(original, types.BuiltinFunctionType):
        _register_with_jit(wrapper, original)
    return wrapper


# ---------------------------------------------------------------------------------------------------------------------
# Functions of the user's.


def half_function(function: Any) -> Any:
    """A decorator: the function's floating arguments are cast to the low-precision type of the acting policy.

    Takes what is called: plain functions, builtins and functions of compiled modules, bound methods, `staticmethod` and
    `classmethod` objects, `torch.autograd.Function.apply`. Tensors are found in all containers of the call; float64 and
    integer tensors are left alone, and so is a call with `out=`. While no casts act the function is called as it is.
    Inside the function torch's own functions keep to the op lists. Gradients arrive in the types of the arguments.

    Source: Apex's `amp.half_function`.

    Raises:
        TypeError: `function` cannot be called.
    """
    return _decorate(function, "user_lower", half_function)


def float_function(function: Any) -> Any:
    """As `half_function`, but FP16 and BF16 arguments are cast to FP32."""
    return _decorate(function, "user_fp32", float_function)


def bfloat16_function(function: Any) -> Any:
    """As `half_function`, but arguments are cast to bfloat16, whatever the type of the policy. Source: ROCm's Apex."""
    return _decorate(function, "user_bfloat16", bfloat16_function)


def promote_function(function: Any) -> Any:
    """As `half_function`, but floating arguments are cast to the widest floating type among them."""
    return _decorate(function, "user_widest", promote_function)


def _decorate(function: Any, rule: str, decorator: Callable[[Any], Any]) -> Any:
    if isinstance(function, (staticmethod, classmethod)) and not isinstance(function, _Function):
        return type(function)(_decorate(function.__func__, rule, decorator))
    if not callable(function):
        raise TypeError(f"{decorator.__name__}: wanted a function, got {function!r} of type {type(function).__name__}")
    return _wrap(function, rule, (decorator, (function,)))


def register_half_function(module: Any, name: str) -> None:
    """From now on `module.name` casts its arguments as `half_function` does, wherever it is called through `module`.

    `module` is a module or a class. The rule takes the place of the op lists' rule for the same name, and of an earlier
    registration. Callable before `initialize` (it acts from then on) and after; it outlives `uninstall`. A caller that
    has imported the function itself (`from module import name`) does not see it.

    Source: Apex's `amp.register_half_function`.

    Raises:
        ValueError: `module` has no such name.
        TypeError: what is there cannot be called.
    """
    _register(module, name, _half_rule(module, name), "register_half_function")


def register_float_function(module: Any, name: str) -> None:
    """As `register_half_function`, with the rule of `float_function`."""
    _register(module, name, "user_fp32", "register_float_function")


def register_bfloat16_function(module: Any, name: str) -> None:
    """As `register_half_function`, with the rule of `bfloat16_function`."""
    _register(module, name, "user_bfloat16", "register_bfloat16_function")


def register_promote_function(module: Any, name: str) -> None:
    """As `register_half_function`, with the rule of `promote_function`."""
    _register(module, name, "user_widest", "register_promote_function")


def leave_alone(module: Any, name: str) -> None:
    """As `register_half_function`, with no rule: calls of `module.name` are not cast, and nothing is refused."""
    _register(module, name, "none", "leave_alone")


def _half_rule(module: Any, name: str) -> str:
    """Of a function whose FP16 may be emulated the rule that does both: the user's would leave it native."""
    for address, rules in OPLISTS.items():
        for rule in ("lower", "einsum", "rnn", "emulated"):
            if name in rules.get(rule, ()) and _resolve(address) is module:
                return "lower" if rule == "emulated" else rule
    return "user_lower"


def _register(module: Any, name: str, rule: str, caller: str) -> None:
    where = getattr(module, "__name__", repr(module))
    if not hasattr(module, name):
        raise ValueError(f"{caller}: {where} has no function named {name!r}")
    if not callable(getattr(module, name)):
        raise TypeError(f"{caller}: {where}.{name} is not a function, it is {getattr(module, name)!r}")
    with _lock:
        if _patches is not None:
            _replace(_patches, module, name, rule, rule)
        _registered[id(module), name] = (module, name, rule)


# ---------------------------------------------------------------------------------------------------------------------
# Regions of the user's.


def disable_casts() -> region:
    """A region of this thread without casts: a context manager, and a decorator. Source: Apex's `disable_casts`.

    torch.autocast is off there too. FP16 on a CPU is multiplied natively.
    """
    return region(None, claims=True)


def _install_in_trace() -> None:
    if not installed():
        install()
        compiling.start_late()


_install_in_trace._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see regions.traced


class autocast(region):
    """The casts of O1 as a region of this thread: a context manager, and a decorator of functions and methods.

    The arguments are `torch.autocast`'s. `device_type` chooses no device: the casts act on tensors everywhere; it names
    the device whose default `dtype` is taken where that is None (`torch.get_autocast_dtype`: FP16 for "cuda", BF16 for
    "cpu"). None is "cuda" where there is one, else "cpu"; "cuda" by name where there is none warns and casts nothing,
    as in torch. FP16 on a CPU is multiplied as `initialize(cpu_fp16="auto")`
    says, unless `device_type` is another device. `enabled=False` is a region without casts; `cache_enabled=False` casts
    a weight at every use (None: as torch does around it). The first entry installs the casts. Regions nest, and one
    object may be entered again, also by other threads.

    Beside `torch.autocast` the inner one has the word. Inside this region, enabled or not, torch's is off
    (`torch.is_autocast_enabled()`, which speaks of torch's alone, is False), and back on afterwards; inside a
    torch.autocast that is entered in here, enabled or not, these casts do not act.

    Raises:
        ValueError: a device type that torch does not know, or a dtype other than float16 and bfloat16.
        TypeError: a device type that is not a string.
    """

    def __init__(
        self,
        device_type: str | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = True,
    ) -> None:
        super().__init__(_autocast_policy(device_type, dtype, enabled), claims=True)
        self.caches = torch.is_autocast_cache_enabled() if cache_enabled is None else bool(cache_enabled)

    def __enter__(self) -> autocast:
        if self.acting is not None:
            if is_dynamo_compiling():
                _install_in_trace()
            else:
                install()
        super().__enter__()
        return self


def _autocast_policy(device_type: Any, dtype: Any, enabled: bool) -> Policy | None:
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    default = _autocast_dtype(device_type)
    if dtype is not None and dtype not in LOW_PRECISION:
        raise ValueError(f"autocast: dtype is {dtype!r}; wanted {' or '.join(map(str, LOW_PRECISION))}, or None")
    if enabled and device_type == "cuda" and not torch.cuda.is_available():
        # A GradScaler of "cuda" is off here too: casts to FP16 would lose small gradients.
        warnings.warn(
            "autocast: device_type is 'cuda', but CUDA is not available, so nothing is cast; for tensors on the CPU "
            "say 'cpu', or leave device_type out",
            stacklevel=3,
        )
        return None
    policy = Policy("O1", dtype=default if dtype is None else dtype, patch_torch_functions=True)
    return settle(policy, on_cpu=device_type == "cpu") if enabled else None


def _autocast_dtype(device_type: Any) -> torch.dtype:
    if not isinstance(device_type, str):
        older = f", or amp_patch.cuda.amp.autocast({device_type})" if isinstance(device_type, bool) else ""
        raise TypeError(f"autocast: device_type is {device_type!r}; wanted a string such as 'cuda' or 'cpu'{older}")
    try:
        return torch.get_autocast_dtype(device_type)
    except RuntimeError:
        raise ValueError(
            f"autocast: device_type is {device_type!r}, which torch does not know; wanted the type of a device, "
            "such as 'cuda' or 'cpu'"
        ) from None

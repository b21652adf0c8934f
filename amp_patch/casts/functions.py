"""Casts for functions that users write: decorators, registered names, and torch.autograd.Function classes.

The casts of torch's own functions, such as `F.linear`, are elsewhere: oplists.py has the rule of each function,
rules.py what a rule does, and wrappers.py the wrappers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple, TypeVar, overload

import torch
from torch.compiler import is_dynamo_compiling

from amp_patch.casts import regions
from amp_patch.casts import state as casts_state
from amp_patch.casts.install import at_install, register
from amp_patch.casts.wrappers import CastFunction, wrap
from amp_patch.policy import Policy
from amp_patch.support import tree
from amp_patch.support.compiled import Function
from amp_patch.support.generated_class import subclasses
from amp_patch.support.patches import Patches

Decorated = TypeVar("Decorated")  # a function; or a `staticmethod`, no Callable to some type checkers

# ---------------------------------------------------------------------------------------------------------------------
# Decorators.


def half_function(function: Decorated) -> Decorated:
    """Decorate a function: its floating arguments are cast to the low-precision type of the acting policy.

    `function` may be a plain function, a builtin, a function of a compiled module, a bound method, a `staticmethod` or
    `classmethod` object, or `torch.autograd.Function.apply`. Tensors are found in all containers of the call. float64
    and integer tensors keep their types. Nothing is cast in a call with `out=`, or while no casts act. Inside the
    function torch's own functions follow the op lists. Gradients arrive in the types of the arguments.

    Source: Apex's `amp.half_function`.

    Raises:
        TypeError: `function` is not callable.
    """
    return _decorate(function, "user_lower", half_function)


def float_function(function: Decorated) -> Decorated:
    """Decorate as `half_function` does, but cast FP16 and BF16 arguments to FP32."""
    return _decorate(function, "user_fp32", float_function)


def promote_function(function: Decorated) -> Decorated:
    """Decorate as `half_function` does, but cast floating arguments to the widest floating type among them."""
    return _decorate(function, "user_widest", promote_function)


def _decorate(function: Any, rule: str, decorator: Callable[[Any], Any]) -> Any:
    if isinstance(function, (staticmethod, classmethod)) and not isinstance(function, CastFunction):
        return type(function)(_decorate(function.__func__, rule, decorator))
    if not callable(function):
        raise TypeError(f"{decorator.__name__}: wanted a function, got {function!r} of type {type(function).__name__}")
    return wrap(function, rule, (decorator, (function,)))


# ---------------------------------------------------------------------------------------------------------------------
# Names.


def register_half_function(module: Any, name: str) -> None:
    """Replace `module.name` by a wrapper that casts its arguments as `half_function` does.

    `module` is a module or a class. The rule overrides the op lists' rule for this name, and an earlier registration.
    May be called before `initialize`, which then installs the wrapper, or after it. The registration survives
    `uninstall`. Code that has imported the function itself (`from module import name`) still calls the original.

    Source: Apex's `amp.register_half_function`.

    Raises:
        ValueError: `module` has no such name.
        TypeError: `module.name` is not callable.
    """
    register(module, name, "user_lower", "register_half_function")


def register_float_function(module: Any, name: str) -> None:
    """Register as `register_half_function` does, with the rule of `float_function`."""
    register(module, name, "user_fp32", "register_float_function")


def register_promote_function(module: Any, name: str) -> None:
    """Register as `register_half_function` does, with the rule of `promote_function`."""
    register(module, name, "user_widest", "register_promote_function")


def register_without_rule(module: Any, name: str) -> None:
    """Register `module.name` without a rule: its calls are not cast, and nothing is refused."""
    register(module, name, "none", "register_without_rule")


# ---------------------------------------------------------------------------------------------------------------------
# custom_fwd and custom_bwd: the casts in user-defined autograd functions, the same in backward as in forward.


class _Casts(NamedTuple):
    """The casts of one thread: the acting policy, torch.autocast's dtype per enabled device type, the emulated type."""

    policy: Policy | None
    native: dict[str, torch.dtype | None]  # device type -> dtype; None or absent: autocast was off
    emulated: torch.dtype | None  # as in `region`; None in traced code: dynamo.py sets the type for the whole graph


_CASTABLE = (torch.float32, torch.float16, torch.bfloat16)


def _act(casts: _Casts) -> bool:
    """Tell whether `casts` cast anything.

    This is no property of `_Casts`, because Dynamo up to torch 2.8 reads only the fields of a named tuple.
    """
    return bool(casts.native) or casts.policy is not None


@overload
def custom_fwd(
    forward: Function, *, device_type: str | None = None, cast_inputs: torch.dtype | None = None
) -> Function: ...
@overload
def custom_fwd(
    forward: None = None, *, device_type: str | None = None, cast_inputs: torch.dtype | None = None
) -> Callable[[Function], Function]: ...
def custom_fwd(
    forward: Callable[..., Any] | None = None,
    *,
    device_type: str | None = None,
    cast_inputs: torch.dtype | None = None,
) -> Any:
    """Decorate the `forward` of a `torch.autograd.Function`, so that `custom_bwd` runs backward under the same casts::

        class MyMatmul(torch.autograd.Function):
            @staticmethod
            @amp.custom_fwd
            def forward(ctx, a, b): ...

            @staticmethod
            @amp.custom_bwd
            def backward(ctx, grad): ...

    Works with the casts of `initialize`, `amp.autocast` and `torch.autocast`. If `forward` takes no `ctx`, decorate
    `setup_context` too, with the same `cast_inputs`: only `setup_context` receives the `ctx`.

    Args:
        forward: the function. None: returns a decorator (`@amp.custom_fwd(cast_inputs=torch.float32)`).
        device_type: the device whose torch.autocast is recorded for backward; None: every device. amp_patch's casts are
            always recorded.
        cast_inputs: while casts act, floating arguments (in all containers; not float64) are cast to this dtype, and
            forward and backward run without casts. None: forward runs under the casts that act, and backward under
            the same.

    Raises:
        TypeError: `cast_inputs` is not a floating dtype, or `forward` is not callable.

    Source: torch.amp.custom_fwd, whose `device_type` is not optional.
    """
    if cast_inputs is not None and not (isinstance(cast_inputs, torch.dtype) and cast_inputs.is_floating_point):
        raise TypeError(f"custom_fwd: cast_inputs is {cast_inputs!r}; wanted a floating dtype such as torch.float32")
    if forward is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    if not callable(forward):
        raise TypeError(f"custom_fwd: wanted a function, got {forward!r}; put it below @staticmethod")

    @functools.wraps(forward)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        casts = _now(device_type)
        no_casts = _Casts(None, {}, casts.emulated)
        contexts = 1 if args and hasattr(args[0], "save_for_backward") else 0
        if contexts:
            args[0]._amp_casts = no_casts if _act(casts) and cast_inputs is not None else casts
        if cast_inputs is None or not _act(casts):
            return forward(*args, **kwargs)
        # `ctx` holds nothing to cast, and Dynamo of torch 2.11 fails at `is_dataclass(ctx)`.
        rest, kwargs = tree.cast_floats((args[contexts:], kwargs), cast_inputs, _CASTABLE)
        args = (*args[:contexts], *rest)
        return _call_under(no_casts, casts, forward, *args, **kwargs)

    return decorated


@overload
def custom_bwd(backward: Function, *, device_type: str | None = None) -> Function: ...
@overload
def custom_bwd(backward: None = None, *, device_type: str | None = None) -> Callable[[Function], Function]: ...
def custom_bwd(backward: Callable[..., Any] | None = None, *, device_type: str | None = None) -> Any:
    """Decorate the `backward` of a `torch.autograd.Function` whose forward has `custom_fwd`.

    Backward runs under the casts and dtype that acted on its forward, or without casts if `cast_inputs` was given. It
    does not depend on the thread that runs backward, nor on the casts that act there.

    Args:
        backward: the function; None returns a decorator.
        device_type: accepted as in torch and not used: the forward has recorded the devices of its casts.

    Raises:
        RuntimeError: at the call, if the forward was not decorated.

    Source: torch.amp.custom_bwd.
    """
    if backward is None:
        return functools.partial(custom_bwd, device_type=device_type)
    if not callable(backward):
        raise TypeError(f"custom_bwd: wanted a function, got {backward!r}; put it below @staticmethod")

    @functools.wraps(backward)
    def decorated(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        recorded = getattr(ctx, "_amp_casts", None)
        if recorded is None:
            raise RuntimeError(
                f"custom_bwd: the forward of {type(ctx).__name__} recorded no casts: decorate it with custom_fwd, and "
                "setup_context too if there is one"
            )
        return _call_under(recorded, _now(None), backward, ctx, *args, **kwargs)

    return decorated


def _now(device_type: str | None) -> _Casts:
    known = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    types = known if device_type is None else [device_type]
    native: dict[str, torch.dtype | None] = {}
    native.update({kind: torch.get_autocast_dtype(kind) for kind in types if torch.is_autocast_enabled(kind)})
    emulated = None if is_dynamo_compiling() else casts_state.in_use.emulated()
    return _Casts(casts_state.current(), native, emulated)


def _call_under(casts: _Casts, outside: _Casts, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)` under `casts` and no others. `outside`: the casts that act on the caller."""
    # Nested `with` statements instead of contextlib.ExitStack, which Dynamo traces only from torch 2.9 on.
    for kind in {*casts.native, *outside.native}:
        dtype = casts.native.get(kind)
        if dtype is not outside.native.get(kind):
            changed = outside._replace(native={**outside.native, kind: dtype})
            with torch.autocast(kind, dtype, enabled=kind in casts.native):
                return _call_under(casts, changed, function, *args, **kwargs)
    # This region is entered last, because the innermost of nested regions decides.
    with regions.region(casts.policy, emulated=casts.emulated):
        return function(*args, **kwargs)


# ---------------------------------------------------------------------------------------------------------------------
# torch's own custom_fwd reads only torch.autocast's state. While our casts are installed, `_honor_cast_inputs` replaces
# it by `custom_fwd` above: in the autograd functions that torch's has already decorated with `cast_inputs`, and in
# torch.amp for functions that are decorated later. The same goes for custom_bwd.


def _honor_cast_inputs(patches: Patches) -> None:
    mode = torch.amp.autocast_mode
    forwards, backwards = _decorated_by(mode.custom_fwd), _decorated_by(mode.custom_bwd)
    for cls in subclasses(torch.autograd.Function):
        forward, backward = (getattr(vars(cls).get(name), "__func__", cls) for name in ("forward", "backward"))
        given = inspect.getclosurevars(forward).nonlocals if getattr(forward, "__code__", None) in forwards else {}
        if given.get("cast_inputs") is None:
            continue
        kind, cast_inputs = given["device_type"], given["cast_inputs"]
        patches.set(cls, "forward", staticmethod(custom_fwd(given["fwd"], device_type=kind, cast_inputs=cast_inputs)))
        if getattr(backward, "__code__", None) in backwards:  # torch's custom_bwd needs torch's custom_fwd
            patches.set(cls, "backward", staticmethod(custom_bwd(backward.__wrapped__, device_type=kind)))

    def fwd_of_ours(fwd: Any = None, *, device_type: str, cast_inputs: torch.dtype | None = None) -> Any:
        return custom_fwd(fwd, device_type=device_type, cast_inputs=cast_inputs)

    def bwd_of_ours(bwd: Any = None, *, device_type: str) -> Any:
        return custom_bwd(bwd, device_type=device_type)

    for owner in (mode, torch.amp):
        patches.set(owner, "custom_fwd", functools.wraps(mode.custom_fwd)(fwd_of_ours))
        patches.set(owner, "custom_bwd", functools.wraps(mode.custom_bwd)(bwd_of_ours))


def _decorated_by(decorator: Any) -> set[CodeType]:
    """Return the code objects of the functions that torch's `decorator` returns."""
    return {found for found in decorator.__code__.co_consts if isinstance(found, CodeType)}


at_install.append(_honor_cast_inputs)

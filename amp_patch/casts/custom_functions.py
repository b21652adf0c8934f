"""custom_fwd and custom_bwd: the casts in user-defined autograd functions, the same in backward as in forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from amp_patch.casts import regions
from amp_patch.casts import state as casts_state
from amp_patch.policy import Policy
from amp_patch.support import tree


class _Casts(NamedTuple):
    """The casts that act on a thread: our policy, and torch.autocast's dtype of each device type that is enabled."""

    policy: Policy | None
    native: dict[str, torch.dtype | None]  # device type -> dtype; None or absent: autocast was off


_NO_CASTS = _Casts(None, {})
_CASTABLE = (torch.float32, torch.float16, torch.bfloat16)


def _act(casts: _Casts) -> bool:
    """Whether `casts` cast anything; the emulation of FP16 on a CPU casts nothing.

    A function, not a property of `_Casts`: Dynamo up to torch 2.8 reads only fields of named tuples.
    """
    policy, native = casts
    return bool(native) or (policy is not None and policy.patch_torch_functions)


def custom_fwd(
    forward: Callable[..., Any] | None = None,
    *,
    device_type: str | None = None,
    cast_inputs: torch.dtype | None = None,
) -> Callable[..., Any]:
    """Decorate the `forward` of a `torch.autograd.Function`; `custom_bwd` then gives its backward the same casts::

        class MyMatmul(torch.autograd.Function):
            @staticmethod
            @amp.custom_fwd
            def forward(ctx, a, b): ...

            @staticmethod
            @amp.custom_bwd
            def backward(ctx, grad): ...

    Works with the casts of a training of `initialize`, of `amp.autocast` and of `torch.autocast`. Where `forward` takes
    no `ctx`, decorate `setup_context` too, with the same `cast_inputs`: only that is handed the `ctx`.

    Args:
        forward: the function. None: returns a decorator (`@amp.custom_fwd(cast_inputs=torch.float32)`).
        device_type: the device whose torch.autocast counts; None: every device. Our own casts know no devices.
        cast_inputs: while casts act, cast floating tensors among the arguments (in all containers; float64 is left
            alone) to this dtype, and run forward and backward without casts. None: forward runs under the casts that
            act, and so will backward.

    Raises:
        TypeError: `cast_inputs` is no floating dtype, or `forward` cannot be called.

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
        contexts = 1 if args and hasattr(args[0], "save_for_backward") else 0
        if contexts:
            args[0]._amp_casts = _NO_CASTS if _act(casts) and cast_inputs is not None else casts
        if cast_inputs is None or not _act(casts):
            return forward(*args, **kwargs)
        # `ctx` holds nothing to cast, and Dynamo of torch 2.11 fails at `is_dataclass(ctx)`.
        rest, kwargs = tree.cast_floats((args[contexts:], kwargs), cast_inputs, _CASTABLE)
        args = (*args[:contexts], *rest)
        return _call_under(_NO_CASTS, casts, forward, *args, **kwargs)

    return decorated


def custom_bwd(backward: Callable[..., Any] | None = None, *, device_type: str | None = None) -> Callable[..., Any]:
    """Decorate the `backward` of a `torch.autograd.Function` whose forward has `custom_fwd`.

    It runs with the casts, in the dtype, that acted on its forward (none, if `cast_inputs` was given), whatever acts
    where backward is called, and on autograd's own threads.

    Args:
        backward: the function; None returns a decorator.
        device_type: as in torch; the devices of the forward's casts were recorded there.

    Raises:
        RuntimeError: on the call, where the forward was not decorated.

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
    types = [device_type] if device_type is not None else _device_types()
    native: dict[str, torch.dtype | None] = {}
    native.update({kind: torch.get_autocast_dtype(kind) for kind in types if torch.is_autocast_enabled(kind)})
    return _Casts(casts_state.current(), native)


def _device_types() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _call_under(casts: _Casts, outside: _Casts, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)` with these casts and no others, where `outside` act."""
    # Nested `with` statements in place of contextlib.ExitStack, which Dynamo traces from torch 2.9 on alone.
    for kind in {*casts.native, *outside.native}:
        dtype = casts.native.get(kind)
        if dtype is not outside.native.get(kind):
            changed = _Casts(outside.policy, {**outside.native, kind: dtype})
            with torch.autocast(kind, dtype, enabled=kind in casts.native):
                return _call_under(casts, changed, function, *args, **kwargs)
    with regions.region(casts.policy):  # entered inside torch's regions: the inner region decides
        return function(*args, **kwargs)

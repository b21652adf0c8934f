"""What torch's GradScalers do, told to observers: which losses they scale, and which optimizers step by them.

While somebody listens, and only then, `scale`, `unscale_` and `step` of `torch.amp.GradScaler`, and of every class that
has them from it and in a way of its own, are replaced by functions that tell of the call: `torch.cuda.amp.GradScaler`,
those that Lightning and accelerate make, FSDP's, ours. A call inside of another is part of that one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from amp_patch.support.patches import Patches

Tell = Callable[..., None]  # is given the name of an observer's method, and its arguments

_NAMES = ("scale", "unscale_", "step")
_patches = Patches()


class _Thread(threading.local):
    inside = False  # whether a call of a scaler's is running


_thread = _Thread()


def install(tell: Tell) -> None:
    """Tell of calls from now on. The caller serialises this with `uninstall`."""
    tellers = {"scale": _scaling, "unscale_": _unscaling, "step": _stepping}
    for owner in _classes(torch.amp.GradScaler):
        for name in _NAMES:
            if name in vars(owner):
                _patches.set(owner, name, _outermost(vars(owner)[name], tellers[name], tell))


def uninstall() -> None:
    _patches.remove()


def _classes(base: type) -> Iterator[type]:
    yield base
    each: type
    for each in base.__subclasses__():
        yield from _classes(each)


def _outermost(original: Callable[..., Any], told: Callable[..., Any], tell: Tell) -> Callable[..., Any]:
    """`original`, told of by `told` unless it is part of another call, or the scaler is disabled."""

    @functools.wraps(original)
    def call(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or _thread.inside or not scaler.is_enabled():
            return original(scaler, *args, **kwargs)
        _thread.inside = True
        try:
            return told(functools.partial(original, scaler), tell, scaler, *args, **kwargs)
        finally:
            _thread.inside = False

    return call


def _scaling(original: Callable[..., Any], tell: Tell, scaler: Any, outputs: Any) -> Any:
    scaled = original(outputs)
    if isinstance(scaled, Tensor) and scaled is not outputs:
        tell("loss_given_to_scaler", scaler, outputs, scaled, vars(scaler)["_scale"].clone())
    return scaled


def _unscaling(original: Callable[..., Any], tell: Tell, scaler: Any, optimizer: Any) -> Any:
    tell("scaler_unscales", scaler, optimizer)
    try:
        return original(optimizer)
    finally:
        tell("scaler_unscaled", scaler, optimizer)


def _stepping(original: Callable[..., Any], tell: Tell, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    skipped: Tensor | None = None
    tell("scaler_steps", scaler, optimizer)
    try:
        result = original(optimizer, *args, **kwargs)
        found = [*scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()]
        nothing = torch.zeros((), dtype=torch.float32, device="cpu")
        skipped = sum((each.to(found[0].device) for each in found[1:]), found[0].clone()) if found else nothing
        return result
    finally:
        tell("scaler_stepped", scaler, optimizer, skipped)

"""Notifies observers (training/observers.py) of the calls of GradScalers: torch's, and their subclasses'.

While there are observers, `scale`, `unscale_` and `step` of `torch.amp.GradScaler` are replaced by functions that
notify them. Overrides in subclasses are replaced too: `torch.cuda.amp.GradScaler`, FSDP's, amp_patch's, and the ones
that Lightning and accelerate define. A call inside another call notifies no observer.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from amp_patch.support.generated_class import subclasses
from amp_patch.support.patches import Patches
from amp_patch.training.observers import tell


class _Thread(threading.local):
    inside = False  # whether a scaler's method is running on this thread


_thread = _Thread()


def runs() -> bool:
    """Tell whether a scaler's method is running on this thread, while there are observers."""
    return _thread.inside


def install(patches: Patches) -> None:
    """Make GradScalers notify the observers, until `patches` are removed."""
    tellers = {"scale": _scaling, "unscale_": _unscaling, "step": _stepping}
    for owner in subclasses(torch.amp.GradScaler):
        for name, told in tellers.items():
            if name in vars(owner):
                patches.set(owner, name, _outermost(vars(owner)[name], told))


def _outermost(original: Callable[..., Any], told: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method that replaces `original`: it calls `told`, which notifies observers and calls `original`.

    In a nested call, or if the scaler is disabled, it calls only `original`.
    """

    @functools.wraps(original)
    def call(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or _thread.inside or not scaler.is_enabled():
            return original(scaler, *args, **kwargs)
        _thread.inside = True
        try:
            return told(functools.partial(original, scaler), scaler, *args, **kwargs)
        finally:
            _thread.inside = False

    return call


def _scaling(original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
    scaled = original(outputs)
    if isinstance(scaled, Tensor) and scaled is not outputs:
        tell("loss_given_to_scaler", scaler, outputs, scaled, vars(scaler)["_scale"].clone())
    return scaled


def _unscaling(original: Callable[..., Any], scaler: Any, optimizer: Any) -> Any:
    tell("scaler_unscales", scaler, optimizer)
    try:
        return original(optimizer)
    finally:
        tell("scaler_unscaled", scaler, optimizer)


def _stepping(original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
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

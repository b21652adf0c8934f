"""torch's gradient clipping, given low-precision parameters, acts on their masters.

Under O2 the gradients are the masters'. `clip_grad_norm_(model.parameters(), 1.0)` finds none on the model and, in
Apex, silently did nothing.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from amp_patch.masters.masters import master_of
from amp_patch.support.patches import Installation, Patches

_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_")
_installation = Installation()


def install() -> None:
    """Redirect torch's clipping functions, also where a script imported them by name earlier; idempotent."""
    _installation.install(_redirect)


def _redirect(patches: Patches) -> None:
    for name in _FUNCTIONS:
        function = getattr(clip_grad, name, None)
        if function is None:  # not in this torch
            continue
        cell = _cell_of(function)
        if cell is not None:
            # Torch's function is a no_grad wrapper, and what it calls is in a closure cell. Every reference to the
            # function shares that cell, also one that a script imported by name.
            patches.set_cell(cell, _redirected(cell.cell_contents))
            continue
        redirected = _redirected(function)
        for owner in (clip_grad, torch.nn.utils):
            patches.set(owner, name, redirected)


def _redirected(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def redirected(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, Tensor):
            return function(_holder(parameters), *args, **kwargs)
        return function([_holder(parameter) for parameter in parameters], *args, **kwargs)

    return redirected


def _holder(param: Tensor) -> Tensor:
    """Whichever of a parameter and its master holds the gradient to clip."""
    master = master_of(param)
    return param if master is None or master.grad is None else master


def _cell_of(function: Any) -> types.CellType | None:
    wrapped = getattr(function, "__wrapped__", None)
    cells = getattr(function, "__closure__", None) or ()
    return next((cell for cell in cells if cell.cell_contents is wrapped and wrapped is not None), None)

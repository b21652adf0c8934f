"""Casts of torch.autocast, inferred from a function's inputs and outputs: torch function modes do not see the casts."""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

import torch

from amp_patch.diagnose.culprit import CASTS
from amp_patch.policy import LOW_PRECISION
from amp_patch.support import tree

AUTOCAST = "torch.autocast"
_COMPOSITES = ("einsum", "gru", "lstm", "rnn_relu", "rnn_tanh")  # functions that call operators on torch's lists
_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}


def type_inside(op: str, args: Any, kwargs: Any, result: Any) -> torch.dtype | None:
    """Return the type to which torch.autocast has cast a function's arguments; None if it is off or has cast none.

    The caller must have disabled torch function modes.

    Args:
        op: the function's name: "linear", "__matmul__".
        args, kwargs, result: the arguments of the call and its result.
    """
    given = [t for t in tree.tensors((args, kwargs)) if t.is_floating_point()]
    made = next((t for t in tree.tensors(result) if t.is_floating_point()), None)
    if made is None or not given or "dtype" in kwargs or not torch.is_autocast_enabled(made.device.type):
        return None
    if not _is_autocast(op.strip("_"), made.device.type) or any(made is t for t in given):
        return None
    if made.dtype in LOW_PRECISION:
        cast = any(t.dtype is torch.float32 for t in given)
    else:
        cast = made.dtype is torch.float32 and all(t.dtype in LOW_PRECISION for t in given)
    return made.dtype if cast else None


def state() -> str:
    """Return the torch.autocast blocks that are enabled now, in words: "bfloat16 on cpu"; "" if none is."""
    on = [kind for kind in _KEYS if torch.is_autocast_enabled(kind)]
    return ", ".join(f"{torch.get_autocast_dtype(kind)} on {kind}".removeprefix("torch.") for kind in on)


@functools.cache
def _is_autocast(op: str, device: str) -> bool:
    """Return whether torch.autocast may cast the arguments of `op` on this device.

    It may if torch has an autocast kernel for the operator, or if `op` is a function that calls such operators.
    """
    if op in _COMPOSITES:
        return True
    packet = getattr(torch.ops.aten, op, None)
    if packet is None or device not in _KEYS:
        return packet is None and op not in CASTS
    key = getattr(torch._C.DispatchKey, _KEYS[device])
    for name in packet.overloads():
        with suppress(RuntimeError):  # a TorchScript overload has no dispatch
            if getattr(packet, name).has_kernel_for_dispatch_key(key):
                return True
    return False

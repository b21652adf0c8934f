"""Calls with several floating types in a cast model's methods: they are cast as at O1 (casts/mixed_operands.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling

from amp_patch.casts import mixed_operands
from amp_patch.model.joints import Call, Entry, ForwardGuest


class MixedCalls(ForwardGuest):
    """Runs methods of a model under `MixedOperands`: all methods if `everywhere`, else those in `methods`."""

    def __init__(self, everywhere: bool) -> None:
        self.everywhere, self.methods = everywhere, set[str]()

    def call(self, call: Call, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return `method`, under the mode if its calls are to be cast."""
        if (self.everywhere or call.kind[0] in self.methods) and (mixed_operands.TRACED or not is_dynamo_compiling()):
            return mixed_operands.cast_within(method, call.state.policy)
        return method


def choose(model: nn.Module, entry: Entry) -> MixedCalls | None:
    """Return a guest if the training leaves tensors FP32 that modules read beside low precision."""
    return MixedCalls(everywhere=True) if entry.policy.mixes_types else None


def cast_mixed_calls(model: Any, method: str) -> bool:
    """Cast calls of several floating types in `method` of a training's model as at O1; return False if they are."""
    guests = vars(model)["_amp"].guests
    guest = next((each for each in guests.all if isinstance(each, MixedCalls)), None)
    if guest is None:
        guests.add(guest := MixedCalls(everywhere=False))
    known = method in guest.methods
    guest.methods.add(method)
    return not known

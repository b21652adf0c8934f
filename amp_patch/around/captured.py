"""Refusal of a first step that a CUDA graph captures: each replay would create the state again."""

from __future__ import annotations

from typing import Any

from amp_patch.masters.masters import has_gradient
from amp_patch.support.generated_class import base_class
from amp_patch.training.stash import Stash


def refuse_first_step(optimizer: Any, stash: Stash) -> None:
    """Raise if the step that is about to be captured would be the first step of a parameter; nothing is changed.

    Raises:
        RuntimeError: the graph would record the creation of the parameter's state, and each replay would reset it:
            SGD's momentum would always be the gradient of the last batch.
    """
    if stash.neighbours.has_stepped and not any(optimizer.state.values()):
        return  # this optimizer keeps no state
    keeps = [  # SGD without momentum creates no state
        "dampening" not in group or group.get("momentum", 0) != 0
        for group in optimizer.param_groups
        for _ in group["params"]
    ]
    for keeps_state, (name, _, record) in zip(keeps, stash.named(optimizer.param_groups), strict=True):
        if keeps_state and has_gradient(record.master) and not optimizer.state.get(record.master):
            raise RuntimeError(
                f"{base_class(optimizer).__name__}.step: a CUDA graph is being captured, and this would be the first "
                f"step of {name}, whose state each replay would reset; let it take a step that is not skipped, of "
                "all its parameters, before the capture"
            )

"""Checks of a step that a CUDA graph captures: replays would create state again, and use old numbers of the host."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from amp_patch.masters.masters import has_gradient
from amp_patch.support import device_sync
from amp_patch.support.generated_class import base_class
from amp_patch.support.scripts_line import warn
from amp_patch.training.stash import Stash


def check(optimizer: Any, stash: Stash) -> None:
    """Check a step that is about to be captured; nothing is changed.

    Warn if a group has a scheduler, and its learning rate is a number or a CPU tensor: each replay would use the
    learning rate of the capture.

    Raises:
        RuntimeError: this would be the first step of a parameter. The graph would record the creation of its state, and
            each replay would reset the state: SGD's momentum would always be the gradient of the last batch.
    """
    _refuse_first_step(optimizer, stash)
    for index, group in enumerate(optimizer.param_groups):
        lr = group.get("lr")
        on_device = isinstance(lr, Tensor) and device_sync.waits(lr.device)
        if "initial_lr" in group and not on_device:  # torch's schedulers leave `initial_lr` in the group
            warn(
                f"{base_class(optimizer).__name__}.step: a CUDA graph is being captured, and the learning rate of "
                f"group {index}, which has a scheduler, is a number of the host: every replay uses its "
                f"current value, {float(lr)}; make it a tensor on the device (lr=torch.tensor(...)) if the optimizer "
                "takes one, or capture again after each change"
            )


def _refuse_first_step(optimizer: Any, stash: Stash) -> None:
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

"""A warning about learning rates of the host in the capture of a CUDA graph: replays would use old ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from amp_patch.support import device_sync
from amp_patch.support.generated_class import base_class
from amp_patch.support.scripts_line import warn


def look(optimizer: Any, _: Any) -> None:
    """Warn if a group has a scheduler, and its learning rate is a number or a CPU tensor."""
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

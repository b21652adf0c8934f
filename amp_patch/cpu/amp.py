"""The names of `torch.cpu.amp` for the CPU, with torch's arguments in torch's order."""

from __future__ import annotations

import torch

from amp_patch import grad_scaler
from amp_patch.casts import autocast as casts_autocast

__all__ = ["GradScaler", "autocast"]


class autocast(casts_autocast.autocast):
    """`amp_patch.autocast` for the CPU: `autocast(False)` casts nothing.

    Args:
        enabled, dtype, cache_enabled: as of `amp_patch.autocast`.

    Source: torch.cpu.amp.autocast.
    """

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype | None = torch.bfloat16, cache_enabled: bool | None = True
    ) -> None:
        super().__init__("cpu", dtype, enabled, cache_enabled)


class GradScaler(grad_scaler.OlderGradScaler):
    """`amp_patch.GradScaler` for the CPU: `GradScaler(2.0**10)`. Source: torch.cpu.amp.GradScaler."""

    device_type = "cpu"

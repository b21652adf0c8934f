"""The names of `torch.cuda.amp` for CUDA, with torch's arguments in torch's order."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, overload

import torch

from amp_patch import grad_scaler
from amp_patch.casts import autocast as casts_autocast
from amp_patch.casts import functions
from amp_patch.support.compiled import Function

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd"]


class autocast(casts_autocast.autocast):
    """`amp_patch.autocast` for CUDA. `autocast(False)` casts nothing. Without CUDA it warns and casts nothing.

    Args:
        enabled, dtype, cache_enabled: as in `amp_patch.autocast`.

    Source: torch.cuda.amp.autocast.
    """

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype | None = torch.float16, cache_enabled: bool | None = True
    ) -> None:
        if enabled and not torch.cuda.is_available():
            warnings.warn(
                "amp_patch.cuda.amp.autocast: CUDA is not available, so nothing is cast; for tensors on the CPU use "
                "amp_patch.autocast(), or amp_patch.cpu.amp.autocast()",
                stacklevel=2,
            )
            enabled = False
        super().__init__("cuda", dtype, enabled, cache_enabled)


class GradScaler(grad_scaler.OlderGradScaler):
    """`amp_patch.GradScaler` for CUDA: `GradScaler(2.0**10)`. Without CUDA it warns and is disabled, as in torch.

    Source: torch.cuda.amp.GradScaler.
    """

    device_type = "cuda"


@overload
def custom_fwd(forward: Function, *, cast_inputs: torch.dtype | None = None) -> Function: ...
@overload
def custom_fwd(forward: None = None, *, cast_inputs: torch.dtype | None = None) -> Callable[[Function], Function]: ...
def custom_fwd(forward: Callable[..., Any] | None = None, *, cast_inputs: torch.dtype | None = None) -> Any:
    """Decorate as `amp_patch.custom_fwd` does, and record the state of torch.autocast for CUDA only.

    Source: torch.cuda.amp.custom_fwd.
    """
    return functions.custom_fwd(forward, device_type="cuda", cast_inputs=cast_inputs)


def custom_bwd(backward: Function) -> Function:
    """Decorate as `amp_patch.custom_bwd` does. Source: torch.cuda.amp.custom_bwd."""
    return functions.custom_bwd(backward, device_type="cuda")

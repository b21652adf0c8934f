"""OneFlow's two grad scalers, with OneFlow's names and arguments."""

from __future__ import annotations

from amp_patch.grad_scaler import GradScaler as AnyGradScaler
from amp_patch.grad_scaler import OlderGradScaler
from amp_patch.policy import scale_number


class GradScaler(OlderGradScaler):
    """`amp_patch.GradScaler` with OneFlow's arguments: `GradScaler(2.0**16, 2.0, 0.5, 2000)`.

    The scale is on CUDA if a device is available. Source: oneflow.amp.GradScaler.
    """


class StaticGradScaler(AnyGradScaler):
    """A constant loss scale. A step whose gradients overflow is skipped; OneFlow's would take it.

    Args:
        scale_factor: the scale, a positive number.

    Raises:
        ValueError: the scale is not a number between 2**-126 and 2**126.

    Source: oneflow.amp.StaticGradScaler.
    """

    def __init__(self, scale_factor: float) -> None:
        scale = scale_number("StaticGradScaler: scale_factor", scale_factor)
        super().__init__(init_scale=scale, min_scale=scale, max_scale=scale)

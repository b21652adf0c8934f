"""`apex.fp16_utils.loss_scaler`: loss scales on the host, for loops that scale the loss themselves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.apex.fp16_utils.fp16util import to_python_float
from amp_patch.support.devices import by_device

__all__ = ["DynamicLossScaler", "LossScaler", "to_python_float"]


class LossScaler:
    """A loss scale that never moves; it looks for no overflow.

    Attributes:
        cur_scale: the scale; also the property `loss_scale`.
    """

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = _checked("scale", scale)

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """False, whatever the gradients are."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Tell it once an iteration whether gradients overflowed."""

    def scale_gradient(self, module: Any, grad_in: Iterable[Any], grad_out: Any) -> tuple[Any, ...]:
        """A full backward hook: the module's input gradients, scaled."""
        return tuple(None if grad is None else self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Backward through `loss` times the scale."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A loss scale found by trial::

        overflow:                                      cur_scale = max(cur_scale / scale_factor, min_loss_scale)
        scale_window iterations since the last one:    cur_scale = min(cur_scale * scale_factor, max_loss_scale)

    Attributes:
        cur_iter: iterations so far, counted by `update_scale`.
        last_overflow_iter: iteration of the last overflow; -1 before the first.
    """

    def __init__(
        self,
        init_scale: float = 2.0**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_loss_scale: float | None = 1.0,
        max_loss_scale: float | None = None,
    ) -> None:
        super().__init__(_checked("init_scale", init_scale))
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window
        self.min_loss_scale = 1.0 if min_loss_scale is None else _checked("min_loss_scale", min_loss_scale)
        self.max_loss_scale = math.inf if max_loss_scale is None else _checked("max_loss_scale", max_loss_scale)

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether the gradient of one of `params` (tensors, or a generator) has an infinity or a NaN; one sync."""
        grads = (param.grad.detach() for param in params if param.grad is not None)
        found = []
        for device, (tensors,) in by_device((g.coalesce().values() if g.is_sparse else g,) for g in grads).items():
            found.append(torch.zeros((), dtype=torch.float32, device=device))
            multi_tensor.multi_tensor_check_finite(tensors, found[-1])
        return any(found_inf.item() for found_inf in found)

    def update_scale(self, overflow: bool) -> None:
        """Move the scale, once an iteration, by whether gradients overflowed."""
        if overflow:
            lowest = max(self.min_loss_scale, multi_tensor.SMALLEST_SCALE)
            self.cur_scale = max(self.cur_scale / self.scale_factor, lowest)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale = min(self.cur_scale * self.scale_factor, self.max_loss_scale)
        self.cur_iter += 1


def _checked(name: str, scale: float) -> float:
    if not (isinstance(scale, int | float) and 0 < scale < math.inf):
        raise ValueError(f"loss scaler: {name} is {scale!r}; wanted a finite positive number")
    return scale

"""`apex.fp16_utils.loss_scaler`: loss scales as Python numbers, for training loops that scale the loss themselves."""

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
    """A constant loss scale. It checks for no overflow.

    Attributes:
        cur_scale: the scale; also the property `loss_scale`.
    """

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = _checked("scale", scale)

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Return False: a constant scale checks nothing."""
        return False

    def update_scale(self, overflow: bool) -> None:
        """Do nothing. Callers call this once an iteration; `DynamicLossScaler` overrides it."""

    def scale_gradient(self, module: Any, grad_in: Iterable[Any], grad_out: Any) -> tuple[Any, ...]:
        """Return the module's input gradients times the scale. The method is a full backward hook."""
        return tuple(None if grad is None else self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Run backward of `loss` times the scale."""
        (loss * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A loss scale that falls at each overflow and grows after `scale_window` iterations without one::

        overflow:                     cur_scale = max(cur_scale / scale_factor, min_loss_scale)
        scale_window clean in a row:  cur_scale = min(cur_scale * scale_factor, max_loss_scale)

    Attributes:
        cur_iter: the number of iterations so far, counted by `update_scale`.
        last_overflow_iter: the iteration of the last overflow; -1 before the first.
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
        """Tell whether the gradient of one of `params` has an infinity or a NaN; one sync for each device."""
        grads = (param.grad.detach() for param in params if param.grad is not None)
        found = []
        for device, (tensors,) in by_device((g.coalesce().values() if g.is_sparse else g,) for g in grads).items():
            found.append(torch.zeros((), dtype=torch.float32, device=device))
            multi_tensor.multi_tensor_check_finite(tensors, found[-1])
        return any(found_inf.item() for found_inf in found)

    def update_scale(self, overflow: bool) -> None:
        """Update the scale. Call this once an iteration; `overflow`: whether its gradients overflowed."""
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

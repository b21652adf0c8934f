"""Gradients that a step is done with: `grad` still gives them, as torch's does, until others come or they are cleared.

Loggers read them, and torch's PeriodicModelAverager averages those parameters alone that have one after the step. No
step takes them, and no backward pass adds to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.multi_tensor.checks import Number
from amp_patch.support.blocks import without_grad


class Gradients(NamedTuple):
    """Gradients, by the id of their masters.

    Attributes:
        half: in low precision.
        factors: what these are to be multiplied by, in FP32, one after the other.
        fp32: as masters have them.
    """

    half: dict[int, Tensor]
    factors: Sequence[Number]
    fp32: dict[int, Tensor]


class SteppedGradients:
    """The gradients of one optimizer's masters that its last step, taken or skipped, was for."""

    def __init__(self) -> None:
        self._held = Gradients({}, (), {})

    def __bool__(self) -> bool:
        return bool(self._held.half or self._held.fp32)

    def hold(self, grads: Gradients) -> None:
        """Hold these in place of those before."""
        self._held = grads

    def read(self, master: Tensor) -> Tensor | None:
        """The gradient of `master`, FP32, or None; made now where it was left in low precision; no sync."""
        half, factors, fp32 = self._held
        if (grad := half.pop(id(master), None)) is not None:
            fp32[id(master)] = _product(grad, factors)
        return fp32.get(id(master))

    def replace(self, master: Tensor, grad: Tensor) -> None:
        """Give `grad` (FP32) as the gradient of `master` from now on."""
        self._held.half.pop(id(master), None)
        self._held.fp32[id(master)] = grad

    def drop(self, master: Tensor) -> None:
        """Forget the gradient of `master`."""
        self._held.half.pop(id(master), None)
        self._held.fp32.pop(id(master), None)

    def clear(self) -> None:
        """Forget all."""
        self._held = Gradients({}, (), {})


@without_grad
def _product(grad: Tensor, factors: Sequence[Number]) -> Tensor:
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return _product(grad, factors)
    result = torch.empty_like(grad, dtype=torch.float32)
    multiply([grad], [result], factors)
    return result


def multiply(grads: list[Tensor], results: list[Tensor], factors: Sequence[Number]) -> None:
    """Write `grads` times all `factors` into `results` (FP32), each product rounded; no sync."""
    first, *others = factors or [1.0]
    multi_tensor.multi_tensor_scale(grads, results, first)
    for factor in others:
        multi_tensor.multi_tensor_scale(results, results, factor)

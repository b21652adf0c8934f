"""Store of the losses that torch's GradScalers have scaled, until the scaler steps an optimizer."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch import Tensor

from amp_patch.diagnose.recording.step import Body, single_value


class _ScaledLoss(NamedTuple):
    """A loss that a scaler has scaled.

    Attributes:
        source: the loss itself, so that `forget` finds it if user code also gives it to `scale_loss`.
        value: a copy of the loss, before it was scaled.
        scale: the tensor by which the scaler multiplied the loss.
        samples: the number of samples in the batch of the forward before it; 0 if unknown.
    """

    source: weakref.ref[Tensor]
    value: Tensor
    scale: Tensor
    samples: int


class ScalerLosses:
    """The losses that each GradScaler has scaled since it last stepped an optimizer."""

    def __init__(self) -> None:
        self._of_scaler: dict[int, list[_ScaledLoss]] = {}  # id of a scaler -> its losses

    def add(self, scaler: Any, loss: Tensor, scale: Tensor, samples: int) -> None:
        """Store a copy of `loss`, the unscaled loss that was given to `scaler.scale`, with `scale` and `samples`.

        `samples` is the number of samples in the batch of the forward before it.
        """
        found = _ScaledLoss(weakref.ref(loss), single_value(loss), scale, samples)
        self._of_scaler.setdefault(id(scaler), []).append(found)

    def has_some(self, scaler: Any) -> bool:
        """Tell whether the scaler has scaled a loss since it last stepped an optimizer."""
        return bool(self._of_scaler.get(id(scaler)))

    def forget(self, loss: Tensor) -> int | None:
        """Drop the record of this loss, and return its number of samples; None if no scaler has scaled it."""
        samples = None
        for losses in self._of_scaler.values():
            for found in [each for each in losses if each.source() is loss]:
                losses.remove(found)
                samples = found.samples
        return samples

    def take(self, scaler: Any) -> list[_ScaledLoss]:
        """Remove and return the losses that the scaler has scaled since it last stepped an optimizer."""
        return self._of_scaler.pop(id(scaler), [])


def body_of(loss: _ScaledLoss, scaler: Any, optimizer: Any) -> Body:
    """Return the loss as a `Body`, as if `scale_loss` had scaled it for this optimizer."""
    own = (id(optimizer),)
    return Body(loss.value, loss.scale, 0, (id(scaler), *own), own, loss.samples)

"""Store of the losses that torch's GradScalers have scaled, until the scaler steps an optimizer."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from amp_patch.diagnose.recording.step import Body, single_value


class ScalerLosses:
    """The losses that each GradScaler has scaled since it last stepped an optimizer."""

    def __init__(self) -> None:
        # id of a scaler -> (the loss itself, its record) of each loss
        self._of_scaler: dict[int, list[tuple[weakref.ref[Tensor], Body]]] = {}

    def add(self, scaler: Any, loss: Tensor, scale: Tensor, samples: int) -> None:
        """Store a copy of `loss`, the unscaled loss that was given to `scaler.scale`, with `scale` and `samples`.

        `samples` is the number of samples in the batch of the forward before it.
        """
        found = Body(single_value(loss), scale, 0, (id(scaler),), (), samples)
        self._of_scaler.setdefault(id(scaler), []).append((weakref.ref(loss), found))

    def has_some(self, scaler: Any) -> bool:
        """Tell whether the scaler has scaled a loss since it last stepped an optimizer."""
        return bool(self._of_scaler.get(id(scaler)))

    def forget(self, loss: Tensor) -> int | None:
        """Drop the record of this loss, and return its number of samples; None if no scaler has scaled it."""
        samples = None
        for losses in self._of_scaler.values():
            for found in [each for each in losses if each[0]() is loss]:
                losses.remove(found)
                samples = found[1].samples
        return samples

    def take(self, scaler: Any, optimizer: Any) -> list[Body]:
        """Remove and return the losses that the scaler has scaled since it last stepped an optimizer.

        They are as if `scale_loss` had scaled them for this `optimizer`.
        """
        own = (id(optimizer),)
        losses = self._of_scaler.pop(id(scaler), [])
        return [each._replace(key=(id(scaler), *own), optimizers=own) for _, each in losses]

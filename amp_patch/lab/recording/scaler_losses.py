"""Losses that GradScalers of torch's have scaled, until an optimizer steps by them."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch import Tensor

from amp_patch.lab.recording.step import Body, single_value


class _ScaledLoss(NamedTuple):
    """A loss that a scaler was given.

    Attributes:
        source: the loss itself, which `scale_loss` may be given too.
        value, scale: copies of it and of the scale.
        samples: how many came before it.
    """

    source: weakref.ref[Tensor]
    value: Tensor
    scale: Tensor
    samples: int


class ScalerLosses:
    """For each scaler its losses since it last stepped an optimizer."""

    def __init__(self) -> None:
        self._of_scaler: dict[int, list[_ScaledLoss]] = {}  # by the id of the scaler

    def add(self, scaler: Any, loss: Tensor, scale: Tensor, samples: int) -> None:
        """Store a copy of a loss that `scaler` has scaled, and the tensor `scale` itself."""
        found = _ScaledLoss(weakref.ref(loss), single_value(loss), scale, samples)
        self._of_scaler.setdefault(id(scaler), []).append(found)

    def has_some(self, scaler: Any) -> bool:
        """Whether the scaler has scaled a loss since it last stepped an optimizer."""
        return bool(self._of_scaler.get(id(scaler)))

    def forget(self, loss: Tensor) -> int | None:
        """Drop the entries of this loss: how many samples came before it; None where it has no entry."""
        samples = None
        for losses in self._of_scaler.values():
            for found in [each for each in losses if each.source() is loss]:
                losses.remove(found)
                samples = found.samples
        return samples

    def take(self, scaler: Any) -> list[_ScaledLoss]:
        """The scaler's losses, which are dropped."""
        return self._of_scaler.pop(id(scaler), [])


def body_of(loss: _ScaledLoss, scaler: Any, optimizer: Any) -> Body:
    """The loss as if `scale_loss` had scaled it for this optimizer."""
    own = (id(optimizer),)
    return Body(loss.value, loss.scale, 0, (id(scaler), *own), own, loss.samples)

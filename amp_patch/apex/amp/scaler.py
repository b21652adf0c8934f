"""Apex's loss scaler, with its private attributes, which scripts read and write."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.policy import Policy, parse_loss_scale, scale_number
from amp_patch.training import loss_scaler as core

__all__ = ["LossScaler"]


def _bound(name: str, or_else: float | None) -> Any:
    """Return a property that is the bound `name` of the scale; `or_else` replaces None in a write."""

    def write(scaler: core.LossScaler, value: float | None) -> None:
        setattr(scaler, name, scale_number(f"LossScaler: _{name}", or_else if value is None else value))

    return property(attrgetter(name), write)


class LossScaler(core.LossScaler):
    """amp_patch's loss scaler with Apex's constructor, methods and private names; usable without `initialize`.

    The private attributes are properties: a read gives the present value, and a write takes effect.

    Args:
        loss_scale: "dynamic", or a positive number.
        init_scale: the initial dynamic scale.
        scale_factor: without effect, as in Apex.
        scale_window: the number of consecutive clean backward passes after which the scale grows.
        min_loss_scale, max_loss_scale: the range of the scale. A min_loss_scale of None is 2**-24 (in Apex it is 0; at
            a scale of 0 gradients become NaN).
        options: keyword arguments of amp_patch's scaler.

    Attributes:
        _overflow_buf: int32, shape [1], on the loss's device: not 0 after an overflow. User code may replace it by its
            own tensor, which `update_scale` then reads.
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = Policy.init_scale,
        scale_factor: float = 2.0,
        scale_window: int = Policy.growth_interval,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
        **options: Any,
    ) -> None:
        floor = min(Policy.min_loss_scale, max_loss_scale) if min_loss_scale is None else min_loss_scale
        super().__init__(
            parse_loss_scale(loss_scale),
            min_loss_scale=floor,
            max_loss_scale=max_loss_scale,
            init_scale=init_scale,
            **{"growth_interval": scale_window, **options},
        )
        self._overflow_buf = torch.zeros(1, dtype=torch.int32, device="cpu")
        self._overflow: bool | Tensor = False  # the flag of the latest update; a device tensor until the first read
        self._moved = False  # whether `update` was called since the last `clear_overflow_state`

    @property
    def _loss_scale(self) -> float:
        """The scale. A read syncs with the device. A write applies to the next loss, also at O0 and O3."""
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, value: float) -> None:
        number = scale_number("LossScaler: _loss_scale", value)
        self._scale.fill_(number)
        self.edits += 1
        self.scales = self.dynamic or number != 1.0

    # Clean backward passes since the scale last moved. Reading syncs with the device.
    _unskipped = property(core.LossScaler.unskipped, lambda self, value: self._growth_tracker.fill_(int(value)))
    # The number of consecutive clean backward passes after which the scale grows.
    _scale_seq_len = property(
        attrgetter("growth_interval"), lambda self, value: setattr(self, "growth_interval", int(value))
    )

    _max_loss_scale = _bound("max_loss_scale", or_else=None)
    _min_loss_scale = _bound("min_loss_scale", or_else=Policy.min_loss_scale)

    @property
    def _has_overflow(self) -> bool:
        """Whether the gradients of the latest update overflowed; True until cleared. Reading syncs with the device."""
        if isinstance(self._overflow, Tensor):
            self._overflow = bool(self._overflow.item())
        return self._overflow

    @_has_overflow.setter
    def _has_overflow(self, value: bool) -> None:
        self._overflow = bool(value)

    def to(self, device: torch.device) -> LossScaler:
        """Move the scale and the overflow flag to `device`, in place; returns the scaler itself."""
        super().to(device)
        if self._overflow_buf.device != device:
            self._overflow_buf = self._overflow_buf.to(device)
        return self

    def record(self, found_inf: Tensor) -> None:
        """Record an overflow if `found_inf` (one element) is not 0. The first call after `update` clears old ones."""
        if self._moved:
            self.clear_overflow_state()
        self._note(found_inf)

    def update(self) -> None:
        """Update the scale by the overflows recorded since the last clear, and store the flag; no sync."""
        found = (self._overflow_buf != 0).any().to(self._scale.device, torch.float32)
        self._found_inf = torch.ones_like(found) if self._overflow is True else found
        self._overflow = self._found_inf.clone()
        self._moved = True
        super().update()

    def clear_overflow_state(self) -> None:
        """Clear the recorded overflow; no sync."""
        self._overflow, self._moved = False, False
        self._overflow_buf.zero_()

    def update_scale(self) -> bool:
        """Update the scale by the overflow recorded since the last clear; returns whether to skip the step. Syncs."""
        self.update()
        return self.dynamic and self._has_overflow

    @torch.no_grad()
    def unscale(
        self,
        model_grads: Iterable[Tensor | None],
        master_grads: Iterable[Tensor | None],
        unused_scale: Any = None,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """Write `model_grads` (any floating dtype), divided by the scale, into `master_grads`; record overflows.

        Do nothing if an overflow is recorded, or if the scale is a static 1 and `models_are_masters`.
        """
        if self._has_overflow:
            return
        given = zip(model_grads, master_grads, strict=True)
        pairs = [(grad, result) for grad, result in given if grad is not None and result is not None]
        if not pairs or (models_are_masters and not self.scales and scale_override is None):
            return
        sources, results = map(list, zip(*pairs, strict=True))
        found_inf = torch.zeros((), dtype=torch.float32, device=sources[0].device)
        scale = self.to(found_inf.device).scale_tensor
        if scale_override is not None:
            scale = torch.full_like(found_inf, scale_override)
        multi_tensor.multi_tensor_scale(sources, results, multi_tensor.inverse_of(scale), found_inf)
        self._note(found_inf)

    def _note(self, found_inf: Tensor) -> None:
        """Set `_overflow_buf` to 1 if `found_inf` is not 0; no sync."""
        buffer = self._overflow_buf
        buffer.copy_(torch.maximum(buffer, (found_inf != 0).to(buffer.device, buffer.dtype)))

"""LossScaler: the factor that keeps small gradients above FP16's underflow, raised and lowered during training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.policy import Policy, scale_number
from amp_patch.support import device_sync
from amp_patch.support.distributed import is_first_rank
from amp_patch.training import joints

logger = logging.getLogger("amp_patch")

# After this many skipped steps in a row a lower scale is unlikely to help, so the message names the parameters.
_MANY_SKIPS = 10


class LossScaler:
    """The loss scale of one loss: the scale, the growth counter and an overflow flag, on the device of the loss.

    Dynamic scaling (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2; the defaults are Apex's: 2**16, 2, 1/2 and
    2000)::

        scale = clamp(init_scale, min_loss_scale, max_loss_scale); unskipped = 0
        after each backward:
            if a gradient is not finite:  scale *= backoff_factor;  unskipped = 0;  the optimizer skips its step
            else:                         unskipped += 1
                                          if unskipped == growth_interval:  scale *= growth_factor;  unskipped = 0
            scale = clamp(scale, min_loss_scale, max_loss_scale)

    A static scale does not change. Its optimizer still skips steps whose gradients are not finite. If the static scale
    is 1, the loss is not multiplied, and gradients are checked only with `skip_nonfinite`.

    Attributes:
        dynamic: whether the scale changes.
        scales: whether the loss is multiplied.
        skip_nonfinite: whether gradients are checked even if the loss is not multiplied.
        growth_interval: the number of backward passes in a row without overflow after which a dynamic scale grows.
        growth_factor, backoff_factor: the factors of the scale when it grows, and at an overflow.
        updates, edits: the number of calls of `update`, and of times that a scale was loaded or set, counted on the
            host. If neither count has changed, the host knows without a sync that the scale has not.
        beside: name in the state dict -> another object whose state is saved together with the scale. Only the first
            scaler of a training has such objects (`joints.beside_scale`).
    """

    def __init__(
        self,
        loss_scale: float | str = "dynamic",
        *,
        loss_id: int = 0,
        min_loss_scale: float,
        max_loss_scale: float,
        init_scale: float = Policy.init_scale,
        growth_factor: float = Policy.growth_factor,
        backoff_factor: float = Policy.backoff_factor,
        growth_interval: int = Policy.growth_interval,
        skip_nonfinite: bool = False,
        verbosity: int = 1,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self.scales = loss_scale != 1.0
        self.skip_nonfinite = skip_nonfinite
        start = min(max(init_scale, min_loss_scale), max_loss_scale) if self.dynamic else float(loss_scale)
        self.loss_id = loss_id
        self.min_loss_scale = min_loss_scale
        self.max_loss_scale = max_loss_scale
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self.verbosity = verbosity
        self.updates = self.edits = 0
        self.beside: dict[str, Any] = {}
        self._scale = torch.tensor(start, dtype=torch.float32, device="cpu")
        self._growth_tracker = torch.tensor(0, dtype=torch.int32, device="cpu")
        self._found_inf = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        self._one = torch.tensor(1.0, dtype=torch.float32, device="cpu")
        self._newest: Tensor | None = None  # the flag of the newest backward pass, not in `_found_inf` yet
        self.skips = 0
        self._skips_in_a_row = 0

    @classmethod
    def of(cls, policy: Policy, *, loss_id: int, verbosity: int) -> LossScaler:
        """Make the scaler of loss `loss_id` in a training under `policy`; only scaler 0 gets objects in `beside`."""
        names = ("min_loss_scale", "max_loss_scale", "init_scale", "growth_factor", "backoff_factor", "growth_interval")
        options = {name: getattr(policy, name) for name in (*names, "skip_nonfinite")}
        scaler = cls(policy.loss_scale, loss_id=loss_id, verbosity=verbosity, **options)
        for made in joints.beside_scale if loss_id == 0 else ():
            scaler.beside |= made(policy)
        return scaler

    @property
    def checks(self) -> bool:
        """Tell whether gradients are checked, and a step is skipped if one of them is not finite."""
        return self.scales or self.skip_nonfinite

    def to(self, device: torch.device) -> LossScaler:
        """Move scale, growth counter and overflow flag to `device`; syncs only if they were on another device.

        In the capture of a CUDA graph a scaler that does not check gradients stays: no kernel reads its numbers.

        Raises:
            RuntimeError: a CUDA graph is being captured, and the scaler checks gradients. Each replay would repeat the
                copy, and reset the scale.
        """
        if self._scale.device != device:
            if device_sync.is_capturing():
                if not self.checks:
                    return self
                raise RuntimeError(
                    f"scale_loss: a CUDA graph is being captured, and this is the first loss on {device}: the loss "
                    f"scale is still on {self._scale.device}, and each replay would reset it; run an iteration with "
                    "scale_loss before the capture"
                )
            self.defer()
            self._scale, self._growth_tracker, self._found_inf, self._one = (
                t.to(device) for t in (self._scale, self._growth_tracker, self._found_inf, self._one)
            )
        return self

    def loss_scale(self) -> float:
        """Return the scale as a number. Syncs with the device."""
        return self._scale.item()

    def unskipped(self) -> int:
        """Return the number of backward passes without overflow since the scale last changed. Syncs with the device."""
        return int(self._growth_tracker.item())

    @property
    def scale_tensor(self) -> Tensor:
        """The scale on its device: FP32, shape []."""
        return self._scale

    def loss_factor(self) -> Tensor:
        """Return the factor of a loss now, on the scale's device: FP32, shape []; 1 if the loss is not multiplied.

        The result does not change with the scale, and must not be written.
        """
        # If the loss is not multiplied, the scale may still be another than 1, from a checkpoint of another level.
        return self._scale.clone() if self.scales else self._one

    def record(self, found_inf: Tensor) -> None:
        """Store the overflow flag of one backward pass (FP32, one element, 1.0: overflow) until `update`; no sync."""
        if self._newest is not None:
            self.defer()
        if self.dynamic:
            self._newest = found_inf.to(self._found_inf.device)

    def defer(self) -> None:
        """Merge the flag that `record` stored with those before it, because no `update` follows at once; no sync.

        This is in place. A captured CUDA graph can end here, and the graph with the update must then read one tensor.
        """
        newest, self._newest = self._newest, None
        if newest is not None:
            self._found_inf.clamp_min_(newest.reshape(()))

    def update(self) -> None:
        """Update a dynamic scale by the overflow flags recorded since the last update, on the device; no sync."""
        self.updates += 1
        newest, self._newest = self._newest, None
        if self.dynamic:
            multi_tensor.update_scale(
                self._scale,
                self._growth_tracker,
                self._found_inf if newest is None else newest,
                growth_factor=self.growth_factor,
                backoff_factor=self.backoff_factor,
                growth_interval=self.growth_interval,
                min_scale=self.min_loss_scale,
                max_scale=self.max_loss_scale,
                earlier_inf=self._found_inf,
            )

    def stepped(self) -> None:
        """Reset the count of skipped steps in a row, because an optimizer took a step with gradients of this loss."""
        self._skips_in_a_row = 0

    def skipped(self, culprits: Callable[[], str]) -> None:
        """Count a step that an optimizer skipped because gradients of this loss overflowed, and log it.

        The log has the 1st, 2nd, 4th, 8th, ... skip, and every tenth in a row. Syncs with the device for the scale in
        the message, if the loss is scaled.

        Args:
            culprits: a function that returns the names of the parameters whose gradients are not finite. It is called
                only after many skips in a row, or if the scale is below 1.
        """
        self.skips += 1
        self._skips_in_a_row += 1
        if self.verbosity < 1 or not is_first_rank():
            return
        scale = self.loss_scale() if self.scales else 1.0
        powers_of_two = self.skips & (self.skips - 1) == 0
        stuck = self._skips_in_a_row % _MANY_SKIPS == 0 or (scale < 1.0 and powers_of_two)
        if not (stuck or powers_of_two):
            return
        if self.scales:
            change = f"loss scale is now {scale:g}" if self.dynamic else f"static loss scale {scale:g} stays"
            message = f"Gradient overflow: skipped the step (skip {self.skips} of loss scaler {self.loss_id}); {change}"
        else:
            message = f"A gradient is not finite: skipped the step (skip {self.skips} of loss {self.loss_id})"
        if stuck:
            message += f"; {self._skips_in_a_row} in a row; not finite: {culprits()}"
        logger.warning(message)

    def state_dict(self) -> dict[str, Any]:
        """Return `loss_scale` and `unskipped`, as Apex does, and the states of the objects in `beside`. Syncs."""
        more = {name: part.state_dict() for name, part in self.beside.items()}
        return {"loss_scale": self.loss_scale(), "unskipped": self.unskipped(), **more}

    def check(self, state: dict[str, Any]) -> None:
        """Raise ValueError if the scale in `state` is invalid, or an object in `beside` cannot load its state."""
        scale_number("load_state_dict: loss_scale", state["loss_scale"])
        for name, part in self.beside.items():
            if name in state:
                part.check(state[name])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`; if `loss_scale` or `unskipped` is missing, raise KeyError before any change."""
        scale, unskipped = float(state["loss_scale"]), int(state["unskipped"])
        self.check(state)
        for name, part in self.beside.items():
            if name in state:
                part.load_state_dict(state[name])
        self.edits += 1
        self._scale.fill_(scale)
        self._growth_tracker.fill_(unskipped)

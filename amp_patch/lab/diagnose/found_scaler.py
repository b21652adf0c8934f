"""The GradScaler of an inspected training, found as it is used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from amp_patch.training.innermost import innermost
from amp_patch.training.observers import Observer


class FoundScaler(Observer):
    """Tells the scale of the backward pass that runs, and of the steps by a scaler, those that it skips too.

    Args:
        scaler: the one to ask, where the caller knows it; else each loss has that which has scaled it.
        targets: the optimizers whose steps count.
        begins, ends: called when a scaler begins to unscale or to step one of them, and after that. `begins` is told
            whether it steps; `ends` whether it did, be the step skipped or taken.

    Attributes:
        scaler: the one that was given, or the last one found.
    """

    def __init__(
        self, scaler: Any, targets: list[Any], begins: Callable[[bool], None], ends: Callable[[bool], None]
    ) -> None:
        self.scaler = scaler
        self._given = scaler is not None
        self._targets = targets
        self._begins, self._ends = begins, ends
        self._backward_scale: Tensor | None = None  # the scale of the loss whose backward pass runs

    def scale(self) -> Tensor | None:
        """By how much the gradients that flow now are multiplied; None where no scaler has scaled their loss."""
        if not self._given:
            return self._backward_scale
        if isinstance(self.scaler, torch.amp.GradScaler) and self.scaler.is_enabled():
            return vars(self.scaler)["_scale"]  # `get_scale` would sync; None until the first loss
        return torch.tensor(float(self.scaler.get_scale()), dtype=torch.float32, device="cpu")

    def loss_given_to_scaler(self, scaler: Any, loss: Tensor, scaled: Tensor, scale: Tensor) -> None:
        self._backward_scale = None  # left over where an exception has ended a backward
        if scaled.requires_grad and not self._given:
            scaled.register_hook(partial(self._backward_begins, scaler, scale))

    def _backward_begins(self, scaler: Any, scale: Tensor, _: Tensor) -> None:
        self.scaler, self._backward_scale = scaler, scale
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._backward_scale = None

    def scaler_unscales(self, scaler: Any, optimizer: Any) -> None:
        if self._is_target(optimizer):
            self._begins(False)

    def scaler_unscaled(self, scaler: Any, optimizer: Any) -> None:
        if self._is_target(optimizer):
            self._ends(False)

    def scaler_steps(self, scaler: Any, optimizer: Any) -> None:
        if self._is_target(optimizer):
            self._begins(True)

    def scaler_stepped(self, scaler: Any, optimizer: Any, skipped: Any) -> None:
        if self._is_target(optimizer):
            self._ends(skipped is not None)

    def _is_target(self, optimizer: Any) -> bool:
        return any(innermost(optimizer) is target for target in self._targets)

"""The GradScaler of an inspected training, found at its first use."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from amp_patch.training.observers import Observer


class FoundScaler(Observer):
    """Knows the scale of the running backward pass.

    Args:
        scaler: the scaler to ask for the scale. With None, each loss has the scale of the scaler that scaled it.

    Attributes:
        scaler: the scaler that was passed, or else the last one found.
    """

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        self._given = scaler is not None
        self._backward_scale: Tensor | None = None  # the scale of the running backward pass

    def scale(self) -> Tensor | None:
        """Return the loss scale by which the gradients of the running backward pass are too large.

        It is a tensor of one element. None if no scaler has scaled the loss of that pass.
        """
        if not self._given:
            return self._backward_scale
        if isinstance(self.scaler, torch.amp.GradScaler) and self.scaler.is_enabled():
            return vars(self.scaler)["_scale"]  # `get_scale` would sync; None until the first loss
        return torch.tensor(float(self.scaler.get_scale()), dtype=torch.float32, device="cpu")

    def loss_given_to_scaler(self, scaler: Any, loss: Tensor, scaled: Tensor, scale: Tensor) -> None:
        self._backward_scale = None  # an exception may have ended the last backward
        if scaled.requires_grad and not self._given:
            scaled.register_hook(partial(self._backward_begins, scaler, scale))

    def _backward_begins(self, scaler: Any, scale: Tensor, _: Tensor) -> None:
        self.scaler, self._backward_scale = scaler, scale
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)

    def _backward_ends(self) -> None:
        self._backward_scale = None

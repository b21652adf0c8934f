"""Trainings whose whole step can be captured in a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
import training
from torch import Tensor, nn

from amp_patch import amp, optimizers

LEVELS = ["O1", "O2", "O5", "O5, split"]
SCALED = ["O1", "O2"]
MAKERS = {
    "torch's fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True, capturable=True),
    "torch's fused SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True),
    "FusedSGD": lambda params: optimizers.FusedSGD(params, lr=0.05, momentum=0.9),
    "FusedAdam": lambda params: optimizers.FusedAdam(params, lr=1e-2, weight_decay=0.1, capturable=True),
    "FusedMixedPrecisionLamb": lambda params: optimizers.FusedMixedPrecisionLamb(params, lr=1e-2),
}


def start_capturable(maker: Any, level: str, device: str = "cpu") -> Any:
    """Model and optimizer. The batch norms use what they have: NaN of a step that overflows would stay in them."""
    model = training.convnet().to(device)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    options = {"loss_scale": "dynamic"} if level in SCALED else {}
    if level == "O5, split":
        level, options = "O5", {"master_weights": "split"}
    return amp.initialize(model, maker(model.parameters()), opt_level=level, verbosity=0, **options)


def iteration(model: Any, optimizer: Any, images: Tensor, classes: Tensor, factor: float | Tensor = 1.0) -> None:
    """Make a step on the loss times `factor`; an infinite factor makes an overflow."""
    loss = nn.functional.cross_entropy(model(images), classes)
    training.backward(loss * factor, optimizer)
    optimizer.step()
    optimizer.zero_grad()


def loss_and_gradients(model: Any, images: Tensor, classes: Tensor) -> list[Tensor]:
    """A forward and its backward alone: the loss, and its gradients in the types of the model's own parameters."""
    loss = nn.functional.cross_entropy(model(images), classes)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

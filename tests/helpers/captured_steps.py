"""Trainings whose whole step can be captured in a CUDA graph, and steps as subclasses of amp.graph.Graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training
from torch import Tensor, nn
from torch._dynamo.utils import counters

from amp_patch import amp, optimizers
from amp_patch.graph import Graph

LEVELS = ["O1", "O2", "O5", "O5, split"]
SCALED = ["O1", "O2"]
MAKERS = {
    "torch's fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True, capturable=True),
    "torch's fused SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True),
    "FusedSGD": lambda params: optimizers.FusedSGD(params, lr=0.05, momentum=0.9),
}


def start_capturable(maker: Any, level: str, device: str = "cpu") -> Any:
    """Return model and optimizer. Batch norms use running statistics, in which NaN of an overflow would stay."""
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


F = nn.functional
LOW = [torch.float16, torch.bfloat16]


@pytest.fixture(name="cleared", autouse=True)
def cleared_fixture(fresh_compiler):
    counters.clear()


class Step(Graph):
    """The graph of the class's documentation; `backend="eager"` computes with the kernels of the eager loop."""

    def __init__(
        self,
        model: nn.Module,
        *optimizers: Any,
        scaler: Any = None,
        dtype: torch.dtype | None = None,
        steps: int = 1,
        lr_sch: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.model = model
        self.config.compile(**{"backend": "eager", **options})
        self.config.set_gradient_accumulation_steps(steps)
        if dtype is not None:
            self.config.enable_amp(True, dtype=dtype)
        for optimizer in optimizers:
            self.add_optimizer(optimizer, lr_sch=lr_sch)
        if scaler is not None:
            self.set_grad_scaler(scaler)

    def build(self, inputs: Tensor, targets: Tensor) -> Any:
        loss = F.cross_entropy(self.model(inputs), targets)
        loss.backward()
        return loss


def scaler_on(device: str, **changes: Any) -> amp.GradScaler:
    settings = {"init_scale": 3000, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, **changes}
    return amp.GradScaler(device, **settings)


class Sum(Step):
    def build(self, inputs: Tensor) -> Any:
        loss = self.model(inputs).sum()
        loss.backward()
        return loss

"""Training steps as subclasses of amp.graph.Graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from amp_patch import amp
from amp_patch.graph import Graph

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

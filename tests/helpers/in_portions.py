"""An optimizer of user code that steps each parameter separately."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Each(torch.optim.Optimizer):
    """An optimizer whose step updates each parameter separately."""

    def __init__(self, params: Any, lr: float = 0.1, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(self.direction(group, param), alpha=-group["lr"])

    def direction(self, group: Any, param: Tensor) -> Tensor:
        return param.grad

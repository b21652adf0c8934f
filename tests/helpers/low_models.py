"""Models that come in low precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from training import backward

HALVES = {"BF16": torch.bfloat16, "FP16": torch.float16}
CAST = {"O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
every_half = pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)


class Net(nn.Module):
    """Layers, a batch norm, a rotary table, a buffer, a frozen layer and a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.table = Table()
        self.frozen = nn.Linear(16, 16)
        self.shared = nn.Linear(16, 16)
        self.again = nn.Linear(16, 16)
        self.again.weight = self.shared.weight
        self.leave = nn.Linear(16, 3)
        self.register_buffer("offset", torch.full((16,), 0.1))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(torch.relu(self.norm(self.enter(x)))) + self.offset
        return self.leave(self.again(torch.tanh(self.shared(self.frozen(x)))))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.linspace(0.1, 3.0, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.angles.cos()


def net(half: torch.dtype) -> Net:
    torch.manual_seed(0)
    return Net().to(half)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    given = x.to(model.enter.weight.dtype) if type(model) is Net else x  # at O0 as in plain torch
    return (model(given).float() - x[:, :3].sin()).square().mean()


def iterate(model: nn.Module, optimizer: Any, steps: int = 30) -> list[float]:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    return losses


def same(some: Any, others: Any) -> bool:
    some, others = list(some), list(others)
    return len(some) == len(others) and all(
        a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(some, others, strict=True)
    )

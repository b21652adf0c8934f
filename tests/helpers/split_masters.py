"""Trainings with split masters, and functions that read the masters."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import iterate

from amp_patch import amp, optimizers
from amp_patch.masters.closed_master import ClosedMaster, form_of
from amp_patch.storage.split_master import HALVES

OPTIM = torch.optim


def tensors(*values: float) -> tuple[Tensor, ...]:
    return tuple(map(torch.tensor, values))


# In one pass; in portions; by itself, with torch's functions and with our kernels.
MAKERS = {
    "AdamW": lambda p: OPTIM.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "AdamW, amsgrad": lambda p: OPTIM.AdamW(p, lr=1e-2, amsgrad=True, fused=True),
    "SGD": lambda p: OPTIM.SGD(p, lr=0.05, momentum=0.9, nesterov=True, fused=True),
    "NAdam": lambda p: OPTIM.NAdam(p, lr=1e-2, foreach=True),
    "RMSprop": lambda p: OPTIM.RMSprop(p, lr=1e-2, foreach=False),
    "Adam, betas that are tensors": lambda p: OPTIM.Adam(p, lr=1e-2, betas=tensors(0.9, 0.99), foreach=False),
    "FusedLAMB": lambda p: optimizers.FusedLAMB(p, lr=1e-2),
    "FusedAdam": lambda p: optimizers.FusedAdam(p, lr=1e-2, weight_decay=0.1),
}


def net(device: str = "cpu") -> nn.Sequential:
    """Linear layers of odd sizes, with one weight exactly half way between two BF16 numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.LayerNorm(33), nn.Linear(33, 5)).to(device)
    with torch.no_grad():
        model[0].weight[0, 0] = 1 + 2.0**-8
    return model


def start_split(make: Any, device: str = "cpu", **options: Any) -> tuple[nn.Sequential, Any]:
    model = net(device)
    return amp.initialize(
        model, make(model.parameters()), **{"opt_level": "O5", "master_weights": "split", "verbosity": 0} | options
    )


def loss_of(model: nn.Module, step: int, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, 16, generator=generator).to(device)
    return (model(inputs).float() - inputs[:, :5].sin()).square().mean()


def iterate_split(model: nn.Module, optimizer: Any, steps: range, device: str = "cpu") -> list[float]:
    return iterate(optimizer, partial(loss_of, model, device=device), steps)


def low_half(master: Tensor) -> Tensor | None:
    """Return the low half of a split master; None for any other master."""
    return getattr(master, "low_half", None)


def is_split(master: Tensor) -> bool:
    return form_of(master) is HALVES


def opened(optimizer: Any) -> int:
    return sum(isinstance(m, ClosedMaster) and m.is_open for m in amp.master_params(optimizer))


def high_half(master: Tensor) -> Tensor:
    """Return a finite FP32 tensor rounded to BF16: to nearest, ties away from zero."""
    return ((master.detach().view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


@pytest.fixture(name="training", params=["AdamW", "NAdam", "FusedLAMB"])
def training_fixture(request: pytest.FixtureRequest) -> tuple[nn.Sequential, Any]:
    """After three steps: in one pass, in portions, and by the optimizer itself."""
    model, optimizer = start_split(MAKERS[request.param])
    iterate_split(model, optimizer, range(3))
    return model, optimizer

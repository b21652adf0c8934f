"""Loops with a GradScaler, and classes of GradScaler that scripts define themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from amp_patch import amp

INF = float("inf")


def scalers(device: str = "cpu", **options: object) -> list[torch.amp.GradScaler]:
    return [torch.amp.GradScaler(device, **options), amp.GradScaler(device, **options)]


def model_and_optimizer(device: str = "cpu", dtype: torch.dtype = torch.float32, fused: bool = False):
    model = nn.Linear(3, 2, device=device, dtype=dtype)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).reshape(2, 3) / 8)
        model.bias.zero_()
    kind = torch.optim.Adam if fused else torch.optim.SGD
    return model, kind(model.parameters(), lr=0.5, **({"fused": True} if fused else {"momentum": 0.5}))


def iterate(scaler, model, optimizer, *, overflow: bool = False, unscale: bool = False):
    optimizer.zero_grad()
    x = torch.tensor([[1.0, 2.0, 4.0]], device=model.weight.device, dtype=model.weight.dtype)
    loss = model(x).float().sum() * (INF if overflow else 1.0)
    scaler.scale(loss).backward()
    if unscale:
        scaler.unscale_(optimizer)
    stepped = scaler.step(optimizer)
    scaler.update()
    return stepped


class Theirs(torch.amp.GradScaler):
    """A GradScaler like FSDP's: it overrides methods of torch's, and calls some of them."""

    def scale(self, outputs):
        return super().scale(outputs)

    def step(self, optimizer, *args, **kwargs):
        return super().step(optimizer, *args, **kwargs)


class Cuda(torch.cuda.amp.GradScaler):
    """torch's older name, which serves CUDA alone."""

    def __init__(self, device, **options):
        torch.amp.GradScaler.__init__(self, device, **options)


def skip_if_it_cannot_unscale(kind, dtype, device):
    """Skip if `kind` is torch's GradScaler, and torch has no kernel for it: for BF16 on CUDA torch 2.11 has none."""
    if kind is not torch.amp.GradScaler:
        return
    found, inverse = torch.zeros((), device=device), torch.ones((), device=device)
    try:
        torch._amp_foreach_non_finite_check_and_unscale_([torch.ones(1, dtype=dtype, device=device)], found, inverse)
    except NotImplementedError:
        pytest.skip(f"torch {torch.__version__}: its GradScaler cannot unscale {dtype} on {device}")

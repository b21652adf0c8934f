"""Loops with a GradScaler."""

from __future__ import annotations

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

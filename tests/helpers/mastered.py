"""Trainings of one weight with a master."""

from __future__ import annotations

import torch
from training import linear

from amp_patch import amp

CAST = ("O2", "O5")


def start_scalar(level="O2", weight=1.0, device="cpu", optimizer=torch.optim.SGD):
    model = linear([[weight]], device)
    return amp.initialize(model, optimizer(model.parameters(), lr=1.0), opt_level=level, loss_scale=64.0)


def output(model):
    device = model.weight.device
    with torch.no_grad():
        return model(torch.ones(1, 1, device=device)).item()

"""Models and loops as scripts for Apex have them."""

from __future__ import annotations

import torch
from apexed import LEVELS, apex_amp  # noqa: F401  the fixture `amp`
from torch.nn import functional as F
from training import images, linear

INF = float("inf")


def make(amp, level, lr=0.25, value=1.0, **kwargs):
    """One weight whose gradient is the input, and its optimizer."""
    model = linear([[value]])
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=lr), opt_level=level, **kwargs)


def backward_by(amp, model, optimizer, grad=0.125, **kwargs):
    loss = (model(torch.ones(1, 1)).float() * grad).sum()
    with amp.scale_loss(loss, optimizer, **kwargs) as scaled_loss:
        scaled_loss.backward()


def train_by(amp, model, optimizer, steps=20):
    losses = []
    for step in range(steps):
        inputs, targets = images(step % 4, next(model.parameters()).device.type)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

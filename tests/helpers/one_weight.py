"""Trainings of one small weight, whose gradients a test can write down."""

from __future__ import annotations

import torch
from training import backward, linear

from amp_patch import amp

SCALED = ["O1", "O2"]
EVERY = ["O0", "O1", "O2", "O3", "O4", "O5"]


def sgd(model, lr=1.0, **kwargs):
    return torch.optim.SGD(model.parameters(), lr=lr, **kwargs)


def setup(level, weight=((1.0, 2.0),), device="cpu", **kwargs):
    """Return a training of a linear layer whose gradient is its input. Its scale leaves small numbers exact in FP16."""
    kwargs.setdefault("loss_scale", 64.0 if level in SCALED else None)
    model = linear([list(row) for row in weight], device)
    return amp.initialize(model, sgd(model), opt_level=level, **kwargs)


def master_grads(optimizer):
    return [None if p.grad is None else p.grad.tolist() for p in amp.master_params(optimizer)]


def x(*values, device="cpu"):
    return torch.tensor([values], device=device)


def backward_row(model, optimizer, factor=1.0, gradient=(3.0, -5.0), **options):
    """Run a backward pass that gives the one-row weight the gradient `gradient` times `factor`."""
    loss = model(x(*gradient, device=model.weight.device)).float().sum() * factor
    backward(loss, optimizer, **options)


def master_of(optimizer):
    return optimizer.param_groups[0]["params"][0]

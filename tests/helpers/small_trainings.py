"""Trainings of one or two small weights, whose gradients a test can write down."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training import LEVELS, SGD, backward, convnet, linear

from amp_patch import amp
from amp_patch.policy import OPT_LEVELS

SCALED = [level for level in LEVELS if OPT_LEVELS[level].loss_scale == "dynamic"]
EVERY = list(LEVELS)


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


LEVELS_WITH_MASTERS = [level for level in LEVELS if OPT_LEVELS[level].master_weights]


def start_scalar(level="O2", weight=1.0, device="cpu", optimizer=torch.optim.SGD):
    model = linear([[weight]], device)
    return amp.initialize(model, optimizer(model.parameters(), lr=1.0), opt_level=level, loss_scale=64.0)


def output(model):
    device = model.weight.device
    with torch.no_grad():
        return model(torch.ones(1, 1, device=device)).item()


CAST = {
    "O2": {"opt_level": "O2", "loss_scale": 64.0},
    "O3": {"opt_level": "O3"},
    "O5": {"opt_level": "O5"},
    "split": {"opt_level": "O5", "master_weights": "split"},
}
MASTERED = ("O2", "O5", "split")


def start_kind(kind, model=None, make_optimizer=SGD):
    model = convnet() if model is None else model
    return amp.initialize(model, make_optimizer(model.parameters()), **CAST[kind])


def values(model):
    return [p.detach().clone() for p in model.parameters()]


TRAININGS: dict[str, dict[str, Any]] = {
    "O0": {"opt_level": "O0"},
    "O3": {"opt_level": "O3"},
    "O4": {"opt_level": "O4"},
    "O5": {"opt_level": "O5"},
    "O5, split": {"opt_level": "O5", "master_weights": "split"},
    "O5, stochastic": {"opt_level": "O5", "master_weights": "stochastic"},
    "O2 in BF16": {"opt_level": "O2", "dtype": torch.bfloat16},
}

every_training = pytest.mark.parametrize("options", TRAININGS.values(), ids=TRAININGS)

"""Trainings with `gradient_release=True`."""

from __future__ import annotations

from typing import Any

import torch
from split_masters import net
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amp_patch import amp
from amp_patch.environment import named_level
from amp_patch.support import tree

OPTIM = torch.optim
LEVELS = ["O4", "O5", "O5+split", "O5+stochastic"]
MAKERS = {
    "AdamW": lambda p: OPTIM.AdamW(p, lr=1e-2, weight_decay=0.1),
    "SGD": lambda p: OPTIM.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "NAdam": lambda p: OPTIM.NAdam(p, lr=1e-2, foreach=True),
    "RMSprop": lambda p: OPTIM.RMSprop(p, lr=1e-2),
}


def start(make: Any, level: str = "O5", model: Any = None, **options: Any) -> tuple[Any, Any]:
    model, named = net() if model is None else model, named_level(level)
    options = {"gradient_release": True, "verbosity": 0} | named.options | options
    return amp.initialize(model, make(model.parameters()), opt_level=named.level, **options)


def numbers(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Return the weights, the masters and the optimizer's state."""
    masters = list(amp.master_params(optimizer))
    state = [each for master in masters for each in tree.tensors(optimizer.state[master])]
    return [t.detach().clone() for t in (*model.parameters(), *masters, *state)]


def twice_checkpointed(model: nn.Module, inputs: Tensor, *, use_reentrant: bool) -> Tensor:
    """The output of two checkpoints that share all weights of `model`."""
    inputs = inputs.detach().requires_grad_()
    return sum(checkpoint(model, factor * inputs, use_reentrant=use_reentrant) for factor in (1.0, 2.0))

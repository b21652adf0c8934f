"""Trainings with optimizer_state="8bit" and torch's ZeroRedundancyOptimizer, and what is asked of them."""

from __future__ import annotations

import io
from typing import Any

import torch
from coded_states import MAKERS, start
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def zero_of(make: Any, params: Any, **options: Any) -> Any:
    """A ZeroRedundancyOptimizer of the optimizers that `make` makes."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    alike = make([nn.Parameter(torch.zeros(1))])
    settings = {name: value for name, value in alike.defaults.items() if name != "decoupled_weight_decay"}
    if hasattr(alike, "adam_w_mode"):
        settings["adam_w_mode"] = alike.adam_w_mode
    return ZeroRedundancyOptimizer(params, type(alike), **settings, **options)


def start_zero(make: str, options: Any, **of_zero: Any) -> tuple[Any, Any, Any]:
    model, optimizer = start(lambda params: zero_of(MAKERS[make], params, **of_zero), **options)
    return model, optimizer, DistributedDataParallel(model)


def consolidated(optimizer: Any) -> dict[str, Any]:
    """The state dict as a file has it, on the first process."""
    optimizer.consolidate_state_dict(to=0)
    return through_file(optimizer.state_dict()) if torch.distributed.get_rank() == 0 else {}


def through_file(states: Any) -> Any:
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file)  # weights alone: there is no class of ours in it


def tensors_of(state_dict: dict[str, Any]) -> list[Tensor]:
    states = sorted(state_dict["state"].items())
    return [t for _, state in states for t in state.values() if isinstance(t, Tensor)]

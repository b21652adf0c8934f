"""Trainings with optimizer_state="8bit" of models that went through torch's `fully_shard`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from coded_states import LEVELS, OPTIM, coded, die_in_the_next_step, loss_of
from coded_states import MAKERS as CODED_MAKERS
from fsdp_trainings import fully_shard, load_checkpoint, save_checkpoint
from torch import Tensor, nn
from training import iterate

from amp_patch import amp

MAKERS = {**CODED_MAKERS, "SGD, not fused": lambda params: OPTIM.SGD(params, lr=0.05, momentum=0.9)}
SHARDED = {name: LEVELS[name] for name in ("O0", "O1", "O2", "O4", "O5")}  # masters of other forms are refused


def net() -> nn.Sequential:
    """On two processes of whose first weight only one has 4,096 elements, and of whose last one has none."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 171), nn.GELU(), nn.Linear(171, 48), nn.LayerNorm(48), nn.Linear(48, 1))


def sharded(level: str) -> Any:
    model = net()
    policy = amp.fsdp_policy(level)
    for index in (0, 2):
        fully_shard(model[index], mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def start(make: Any, **options: Any) -> tuple[Any, Any]:
    wanted = {"opt_level": "O5", "optimizer_state": "8bit", "verbosity": 0} | options
    model = sharded(wanted["opt_level"])
    return amp.initialize(model, (MAKERS.get(make) or make)(model.parameters()), **wanted)


def go_on(model: Any, optimizer: Any, steps: range) -> list[float]:
    return iterate(optimizer, lambda step: loss_of(model, 2 * step + dist.get_rank()), steps)


def here(tensors: Any) -> list[Tensor]:
    """What this process holds of each."""
    return [t.to_local().detach().clone() if hasattr(t, "to_local") else t.detach().clone() for t in tensors]


def state_of(optimizer: Any) -> list[Tensor]:
    """All tensors of the state as `state_dict()` gives them, those of this process."""
    states = sorted(optimizer.state_dict()["state"].items())
    return here(t for _, state in states for t in state.values() if isinstance(t, Tensor))


def resumable(make: str, options: Any, steps: range, load: str = "", save: str = "", end: int = 0) -> dict[str, Any]:
    """Train `steps`, from the checkpoint `load`; save one after step 2; rank 1 is killed within step `end`."""
    model, optimizer = start(make, **options)
    if load:
        load_checkpoint(model, optimizer, load)
    loaded = state_of(optimizer)

    losses = []
    for step in steps:
        if end and step == end:
            die_in_the_next_step(optimizer)
        losses += go_on(model, optimizer, range(step, step + 1))
        if step == 2 and save:
            save_checkpoint(model, optimizer, save)
    return {
        "losses": losses,
        "loaded": loaded,
        "end": [*here(model.parameters()), *state_of(optimizer)],
        "coded": coded(optimizer),
    }

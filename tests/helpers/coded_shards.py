"""Trainings under torch's `fully_shard`, with state in eight bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from coded_states import LEVELS, OPTIM, coded, die_in_the_next_step, in_eight_bits, loss_of
from coded_states import MAKERS as CODED_MAKERS
from coded_states import state_of as whole_state_of
from fsdp_trainings import fully_shard, load_checkpoint, save_checkpoint
from torch import Tensor, nn
from training import backward, iterate, skipped

from amp_patch import amp
from amp_patch.storage.coded_state import codes_of

MAKERS = {**CODED_MAKERS, "SGD, not fused": lambda params: OPTIM.SGD(params, lr=0.05, momentum=0.9)}
SHARDED = {name: LEVELS[name] for name in ("O0", "O1", "O2", "O4", "O5")}  # compressed masters are refused


def net() -> nn.Sequential:
    """Return a model for two ranks: its first weight has 4,096 local elements on one rank only, and one rank
    has no element of its last weight."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 171), nn.GELU(), nn.Linear(171, 48), nn.LayerNorm(48), nn.Linear(48, 1))


def sharded(level: str, dtype: torch.dtype = torch.float32) -> Any:
    model = net().to(dtype)
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
    """Return a copy of each tensor's local shard."""
    return [t.to_local().detach().clone() if hasattr(t, "to_local") else t.detach().clone() for t in tensors]


def state_of(optimizer: Any) -> list[Tensor]:
    """Return the local shards of all tensors of the state, as in `state_dict()`."""
    return here(whole_state_of(optimizer))


def referenced(make: Any, options: Any) -> dict[str, Any]:
    """Run the same training step by step: a torch optimizer steps the local shards, and its state is rounded."""
    model, optimizer = start(make, **options | {"optimizer_state": None})
    shards = list(model.parameters())
    parts = [nn.Parameter(shard.to_local().detach().float()) for shard in shards]
    reference = (MAKERS.get(make) or make)(parts)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, 2 * step + dist.get_rank())
        backward(loss, optimizer)
        for part, shard in zip(parts, shards, strict=True):
            part.grad = shard.grad.to_local().float()
        reference.step()
        losses.append(loss.item())
        for part, shard in zip(parts, shards, strict=True):
            shard.to_local().detach().copy_(part.detach())
        for part, state in reference.state.items():
            for name, value in state.items():
                codes = codes_of(type(reference).__name__, name, state)
                if part.numel() >= 4096 and getattr(value, "shape", None) == part.shape and codes is not None:
                    value.copy_(in_eight_bits(value, codes))
    return {"losses": losses, "weights": here(shards), "state": state_of(reference)}


def resumable(make: Any, options: Any, steps: range, load: str = "", save: str = "", end: int = 0) -> dict[str, Any]:
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


def trained(make: Any, options: Any, **settings: Any) -> dict[str, Any]:
    """Four steps; `settings` are put into the first group after `initialize`. No state is to be a plain tensor then."""
    model, optimizer = start(make, **options)
    optimizer.param_groups[0].update(settings)
    losses = go_on(model, optimizer, range(4))
    return {
        "losses": losses,
        "weights": here(model.parameters()),
        "coded": coded(optimizer),
        "state": state_of(optimizer),
        "plain": [n for s in optimizer.state.values() for n, v in s.items() if type(v) is Tensor and v.dim()],
    }


def overflows(make: Any, options: Any) -> dict[str, Any]:
    """A step whose gradients overflow on rank 1 alone; what this process holds before, after, and a step later."""
    model, optimizer = start(make, **options | {"loss_scale": "dynamic", "max_loss_scale": 1024.0})
    go_on(model, optimizer, range(2))
    before = [*here(model.parameters()), *state_of(optimizer)]
    optimizer.zero_grad()
    # One value of what rank 1 holds alone: the loss of both is finite.
    with amp.scale_loss(loss_of(model, 2), optimizer) as loss:
        loss.backward()
        if dist.get_rank():
            model[0].weight.grad.to_local()[0, 0] = float("inf")
    optimizer.step()
    after = [*here(model.parameters()), *state_of(optimizer)]
    skip = skipped(optimizer)
    go_on(model, optimizer, range(3, 4))
    end = [*here(model.parameters()), *state_of(optimizer)]
    found = {"before": before, "after": after, "end": end}
    return found | {"skipped": skip, "coded": coded(optimizer)}

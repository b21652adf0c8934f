"""`initialize(skip_nonfinite=True)` on several ranks and shards."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import training
from crossed import crossed
from small_trainings import every_training
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import ADAM, backward, same

from amp_patch import amp


def mine(step: int) -> tuple[Tensor, Tensor]:
    """This rank's half of the batch of a step."""
    return tuple(tensor.chunk(2)[dist.get_rank()] for tensor in training.images(step))  # type: ignore[return-value]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 5))


def train_rank(options: dict[str, Any], way: str, bad: float, on: bool) -> dict[str, Any]:
    """Three steps; what one rank's data are multiplied by in the second is `bad`."""
    model = mlp()
    group = dist.group.WORLD if way == "process group" else None
    model, optimizer = amp.initialize(
        model, ADAM(model.parameters()), skip_nonfinite=on, verbosity=0, process_group=group, **options
    )
    wrapped = model if way == "process group" else DistributedDataParallel(model)
    seen: dict[str, Any] = {"skipped": [], "weights": []}
    for step in range(3):
        optimizer.zero_grad()
        factor = bad if step == 1 and dist.get_rank() == 1 else 1.0
        if way == "no_sync":
            with wrapped.no_sync():
                inputs, targets = mine(step + 10)
                backward(nn.functional.cross_entropy(wrapped(inputs * factor), targets), optimizer)
            factor = 1.0
        inputs, targets = mine(step)
        backward(nn.functional.cross_entropy(wrapped(inputs * factor), targets), optimizer)
        optimizer.step()
        seen["skipped"].append(optimizer._amp_stash.step_skipped)
        seen["weights"].append([p.detach().clone() for p in amp.master_params(optimizer)])
    return seen


@crossed({"way": ["ddp", "no_sync", "process group"]}, every_training, meet=1)
def test_all_ranks_skip_a_step_that_is_not_finite_on_one(ranks, options, way):
    results = ranks(train_rank, options, way, math.nan, True)
    for seen in results:
        assert seen["skipped"] == [False, True, False]
        assert same(seen["weights"][0], seen["weights"][1]) and not same(seen["weights"][1], seen["weights"][2])
    if way != "process group":
        assert same(results[0]["weights"][2], results[1]["weights"][2])
    checked, plain = (ranks(train_rank, options, way, 1.0, on) for on in (True, False))
    for ours, wanted in zip(checked, plain, strict=True):
        assert ours["skipped"] == [False] * 3 and same(ours["weights"][2], wanted["weights"][2])

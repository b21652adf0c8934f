"""DistributedDataParallel and its kin at every level, in two processes: `ranks` runs the functions at the top of a part.

Ranks are told apart by their data alone, and what both must hold alike is compared bit by bit.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import ADAM, LEVELS, SGD, backward, convnet, images, linear, same, weights

from amp_patch import amp

SCALED = {"loss_scale": 1024.0}


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 5))


def mine(step: int) -> tuple[Tensor, Tensor]:
    """This rank's half of the batch of a step."""
    return tuple(tensor.chunk(2)[dist.get_rank()] for tensor in images(step))  # type: ignore[return-value]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def masters(optimizer: Any) -> list[Tensor]:
    return [param.detach().clone() for param in amp.master_params(optimizer)]


def gradients(optimizer: Any) -> list[Tensor]:
    return [param.grad.clone() for param in amp.master_params(optimizer)]


def both_alike(results: list[list[Tensor]]) -> list[Tensor]:
    """What both ranks returned."""
    assert same(*results), "the ranks differ"
    return results[0]


def close(left: list[Tensor], right: list[Tensor], tolerance: float) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)


# Training


def train(
    level: str | None,
    steps: int = 50,
    make: Any = mlp,
    optim: Any = ADAM,
    seed_by_rank: bool = False,
    hook: bool = False,
    ddp: dict[str, Any] | None = None,
    **initialize: Any,
) -> list[Tensor]:
    """The weights (the masters') after so many steps; None: plain DDP without a line of ours."""
    model = make(dist.get_rank() if seed_by_rank else 0)
    optimizer = optim(model.parameters())
    if level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, **initialize)
    wrapped = DistributedDataParallel(model, **(ddp or {}))
    if hook:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        wrapped.register_comm_hook(None, fp16_compress_hook)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(wrapped, mine(step))
        if level is None:
            loss.backward()
        else:
            backward(loss, optimizer)
        optimizer.step()
    return weights(model)


def train_alone(level: str, steps: int, **initialize: Any) -> list[Tensor]:
    """The same batches in one process."""
    model = mlp()
    model, optimizer = amp.initialize(model, ADAM(model.parameters()), opt_level=level, **initialize)
    for step in range(steps):
        optimizer.zero_grad()
        backward(loss_of(model, images(step)), optimizer)
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("level", LEVELS)
def test_ranks_hold_the_same_bits_after_50_steps_though_they_began_with_other_weights(ranks, level):
    end = both_alike(ranks(train, level, make=convnet_of, seed_by_rank=True))
    start = both_alike(ranks(train, level, 0, make=convnet_of, seed_by_rank=True))
    assert not same(end, start)
    if level == "O0":
        assert same(end, both_alike(ranks(train, None, make=convnet_of, seed_by_rank=True)))


def convnet_of(seed: int) -> nn.Module:
    return nn.SyncBatchNorm.convert_sync_batchnorm(convnet(seed)) if torch.cuda.is_available() and False else convnet(seed)


@pytest.mark.parametrize("level", LEVELS)
def test_two_ranks_train_as_one_process_does(ranks, level):
    together = both_alike(ranks(train, level, 20))
    # FP32 differs by the order of its sums; low-precision gradients are rounded before they are added.
    tolerance = {"O0": 1e-5, "O1": 1e-2, "O2": 1e-2, "O3": 3e-2}.get(level, 6e-2)
    close(together, train_alone(level, 20), tolerance)

"""Trainings of two ranks under torch's DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import ADAM, SGD, backward, images, same, skipped

from amp_patch import amp

SCALED = {"loss_scale": 1024.0}


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 5))


def mine(step: int) -> tuple[Tensor, Tensor]:
    """Return this rank's half of the batch of a step."""
    return tuple(tensor.chunk(2)[dist.get_rank()] for tensor in images(step))  # type: ignore[return-value]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def learned(model: nn.Module) -> list[Tensor]:
    """The parameters, FP32 as a checkpoint has them. (Batch norms' statistics are each rank's own between forwards.)"""
    state = model.state_dict()
    return [state[name].clone() for name, _ in model.named_parameters()]


def sgd(params: Any) -> torch.optim.Optimizer:
    return SGD(params)


def adam(params: Any) -> torch.optim.Optimizer:
    return ADAM(params)


def both_alike(results: list[list[Tensor]]) -> list[Tensor]:
    """Assert that both ranks have the same bits; return them."""
    assert same(*results), "the ranks differ"
    return results[0]


def close(left: list[Tensor], right: list[Tensor], tolerance: float) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)


def train_ranks(
    level: str | None,
    steps: int = 50,
    make: Any = mlp,
    optim: Any = adam,
    seed_by_rank: bool = False,
    hook: bool = False,
    ddp: dict[str, Any] | None = None,
    **initialize: Any,
) -> list[Tensor]:
    """The weights (the masters') after `steps` steps; None: plain DDP without amp_patch."""
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
    return learned(model)


def overflow_on_one_rank(level: str, make: Any, value: float, **options: Any) -> tuple[dict[str, Any], Any]:
    """Take three steps, with `value` in the second batch of rank 1; return the observations and the optimizer."""
    model = mlp()
    model, optimizer = amp.initialize(
        model, make(model.parameters()), opt_level=level, loss_scale="dynamic", verbosity=0, **options
    )
    wrapped = DistributedDataParallel(model)
    seen: dict[str, Any] = {"skipped": [], "scales": [], "weights": []}
    for step in range(3):
        inputs, targets = mine(step)
        if step == 1 and dist.get_rank() == 1:
            inputs[0, 0, 0, 0] = value
        optimizer.zero_grad()
        backward(loss_of(wrapped, (inputs, targets)), optimizer)
        optimizer.step()
        seen["skipped"].append(skipped(optimizer))
        seen["scales"].append(amp.state_dict()["loss_scaler0"]["loss_scale"])
        seen["weights"].append(learned(model))
    return seen, optimizer


def assert_skipped_by_all(results: list[dict[str, Any]]) -> None:
    for seen in results:
        assert seen["skipped"] == [False, True, False]
        assert seen["scales"] == [65536.0, 32768.0, 32768.0]
        assert same(seen["weights"][0], seen["weights"][1]) and not same(seen["weights"][1], seen["weights"][2])
    both_alike([seen["weights"][2] for seen in results])

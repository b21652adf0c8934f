"""Copies of a model in DistributedDataParallel, in two processes: alone, and with the optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from training import ADAM, backward, convnet, images, same

from amp_patch import amp

LEVELS = ("O0", "O1", "O2", "O3", "O5")


def steps(model: Any, optimizer: Any, numbers: range) -> None:
    for number in numbers:
        inputs, targets = images(2 * number + dist.get_rank())
        optimizer.zero_grad()
        backward(torch.nn.functional.cross_entropy(model(inputs), targets), optimizer)
        optimizer.step()


def begin(level: str) -> tuple[Any, Any]:
    model = convnet()
    model, optimizer = amp.initialize(model, ADAM(model.parameters()), opt_level=level)
    wrapped = DistributedDataParallel(model)
    steps(wrapped, optimizer, range(3))
    return wrapped, optimizer


def pair(level: str, copied: bool) -> list[Tensor]:
    wrapped, optimizer = begin(level)
    if copied:
        wrapped, optimizer = copy.deepcopy((wrapped, optimizer))
    steps(wrapped, optimizer, range(3, 8))
    state = wrapped.module.state_dict()  # of batch norms each rank has its own
    return [state[name].clone() for name, _ in wrapped.module.named_parameters()]


def alone(level: str) -> tuple[list[Tensor], list[Tensor], bool]:
    wrapped, optimizer = begin(level)
    average = copy.deepcopy(wrapped).eval()
    inputs, _ = images(0)
    with torch.no_grad():
        alike = torch.equal(average(inputs), wrapped.eval()(inputs))
    masters = [p.detach().float() for p in amp.master_params(optimizer)]
    return [p.detach().clone() for p in average.parameters()], masters, alike


@pytest.mark.parametrize("level", LEVELS)
def test_a_wrapped_model_copied_with_its_optimizer_trains_on_in_step(ranks, level):
    first, second = ranks(pair, level, True)
    assert same(first, second)
    assert same(first, ranks(pair, level, False)[0])


@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_of_the_wrapper_has_the_masters_values(ranks, level):
    for values, masters, alike in ranks(alone, level):
        assert same(values, masters) and alike

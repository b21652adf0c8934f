"""Optimizers that share a weight, and delayed exits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from training import LEVELS, backward, linear, skipped

from amp_patch import amp


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_optimizers_that_share_a_weight_unscale_it_once_after_a_delayed_exit(level):
    model = linear([[1.0, 1.0]])
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2)]
    model, optimizers = amp.initialize(model, optimizers, opt_level=level, loss_scale=128.0)
    backward(model(torch.tensor([[2.0, 4.0]])).sum(), optimizers, delay_unscale=True)
    for optimizer in optimizers:
        optimizer.step()
    master = next(amp.master_params(optimizers[0]))
    assert master.tolist() == [[-3.0, -7.0]]  # 1 - 2 * 2, 1 - 2 * 4


def two_of_one_weight(level, scale):
    model = linear([[64.0]])
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for _ in range(2)]
    model, optimizers = amp.initialize(model, optimizers, opt_level=level, num_losses=2, verbosity=0)
    amp.load_state_dict({f"loss_scaler{i}": {"loss_scale": scale, "unskipped": 0} for i in range(2)})
    return model, *optimizers


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("last", [0, 1])
def test_an_overflow_in_a_shared_weight_skips_the_steps_of_both_optimizers(last, bad, level):
    """Each loss goes to one of them."""
    model, *optimizers = two_of_one_weight(level, 8.0)
    for index in (0, 1):
        value = torch.full((1, 1), math.inf if index == bad else 1.0)
        backward(model(value).sum(), optimizers[index], loss_id=index)
    for optimizer in (optimizers[1 - last], optimizers[last]):
        optimizer.step()
        assert skipped(optimizer) and model.weight.item() == 64.0
    assert [s["loss_scale"] for s in amp.state_dict().values()] == [4.0 if index == bad else 8.0 for index in (0, 1)]
    for optimizer in optimizers:
        optimizer.zero_grad()
    for index in (0, 1):
        backward(model(torch.ones(1, 1)).sum(), optimizers[index], loss_id=index)
        optimizers[index].step()
        optimizers[index].zero_grad()
    assert model.weight.item() == 62.0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_id", [None, 0, 1])
def test_a_shared_weight_s_gradients_of_a_delayed_exit_are_unscaled_for_the_first_reader(loss_id, level):
    model, first, second = two_of_one_weight(level, 8.0)
    one = torch.ones(1, 1)
    backward(model(one).sum(), first, loss_id=0, delay_unscale=True)
    if loss_id is not None:
        backward(2 * model(one).sum(), second, loss_id=loss_id)
    gradient = 1.0 if loss_id is None else 3.0
    second.step()
    assert model.weight.item() == 64.0 - gradient
    first.step()
    assert model.weight.item() == 64.0 - 2 * gradient


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("leave", [amp.restore, None])
def test_gradients_that_overflowed_are_dropped_where_the_training_ends_before_the_step(level, leave):
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    backward(model(torch.ones(1, 3)).sum() * math.inf, optimizer)
    before = next(amp.master_params(optimizer)).detach().clone()
    if leave is None:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    else:
        leave()
    optimizer.step()
    assert torch.equal(next(amp.master_params(optimizer)), before)

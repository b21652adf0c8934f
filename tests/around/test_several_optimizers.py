"""`scale_loss` in trainings with several optimizers: shared parameters, GANs, nested bodies."""

from __future__ import annotations

import math

import pytest
import torch
from small_trainings import EVERY, master_grads, sgd, x
from torch import nn
from training import backward, linear, skipped

from amp_patch import amp


@pytest.mark.parametrize("level", EVERY)
def test_two_optimizers_over_one_model_share_its_masters(level):
    model = linear([[1.0]])
    model, first = amp.initialize(model, sgd(model), opt_level=level, loss_scale=64.0)
    model, second = amp.initialize(model, sgd(model), opt_level=level, loss_scale=64.0)
    for optimizer in (first, second):
        backward(model(x(1.0)).sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert model.weight.item() == -1.0
    assert [p.item() for p in amp.master_params(first)] == [-1.0]


def test_gradients_that_another_loss_left_are_no_part_of_the_next_backward():
    netd, netg = linear([[1.0]]), linear([[2.0]])
    (netd, netg), (optd, optg) = amp.initialize([netd, netg], [sgd(netd), sgd(netg)], opt_level="O2", loss_scale=64.0)
    backward(netd(netg(x(1.0))).sum(), optg)
    assert netd.weight.grad is None  # it was scaled, and nobody's
    backward(netd(x(3.0)).sum(), optd)
    assert master_grads(optd) == [[[3.0]]]


@pytest.mark.parametrize("level", EVERY)
def test_optimizers_that_share_a_parameter_unscale_it_once_and_skip_together(level):
    model = linear([[1.0]])
    model, optimizers = amp.initialize(model, [sgd(model), sgd(model)], opt_level=level, loss_scale=64.0, verbosity=0)
    for _ in range(2):
        backward(model(x(0.25)).sum(), optimizers)
    assert master_grads(optimizers[0]) == master_grads(optimizers[1]) == [[[0.5]]]
    backward(model(x(math.inf)).sum(), optimizers)
    for optimizer in optimizers:
        optimizer.step()
        assert skipped(optimizer)
    assert model.weight.item() == 1.0


@pytest.mark.parametrize("level", EVERY)
def test_nested_bodies_unscale_once(level):
    netd, netg = nn.BatchNorm1d(1), nn.BatchNorm1d(1)
    (netd, netg), (optd, optg) = amp.initialize(
        [netd, netg], [sgd(netd), sgd(netg)], opt_level=level, num_losses=2, loss_scale=64.0
    )
    inputs = torch.tensor([[0.0], [2.0]])
    with (
        amp.scale_loss(netd(inputs).sum(), optd, 0) as first,
        amp.scale_loss(netg(inputs).sum(), optg, 1) as second,
    ):
        first.backward()
        second.backward()
    for optimizer in (optd, optg):
        assert list(amp.master_params(optimizer))[1].grad.item() == 2.0

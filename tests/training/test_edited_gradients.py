"""Gradients and weights that user code clips, edits or clears between backward and step."""

from __future__ import annotations

import math

import pytest
import torch
from small_trainings import EVERY, master_grads, sgd, x
from torch import nn
from training import backward, linear

from amp_patch import amp


@pytest.mark.parametrize("level", EVERY)
def test_a_gradient_that_exists_at_initialize_is_carried_over(level):
    model = linear([[1.0, 2.0]])
    model(x(0.5, 0.25)).sum().backward()
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, loss_scale=64.0)
    backward(model(x(0.5, 0.25)).sum(), optimizer)
    assert master_grads(optimizer) == [[[1.0, 0.5]]]


@pytest.mark.parametrize("level", EVERY)
def test_sparse_gradients_are_unscaled_and_checked(level):
    model = nn.Embedding(4, 2, sparse=True)
    with torch.no_grad():
        model.weight.fill_(1.0)
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, loss_scale=64.0, verbosity=0)
    ids = torch.tensor([1, 1, 3])
    for _ in range(1 if level == "O3" else 2):  # torch cannot add sparse FP16 gradients on a CPU
        backward(model(ids).float().sum() / (2 if level == "O3" else 4), optimizer)
    optimizer.step()
    assert model.weight.tolist() == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0], [0.5, 0.5]]
    optimizer.zero_grad()
    backward(model(ids).float().sum() * 2.0**14, optimizer)  # 2 * 2**14 * 64 is no FP16 number
    optimizer.step()
    if level in ("O2", "O3"):
        assert optimizer._amp_stash.step_skipped


@pytest.mark.parametrize("level", EVERY)
def test_complex_parameters_are_trained_as_they_are(level):
    phase = nn.Parameter(torch.tensor([1.0 + 2.0j]))
    optimizer = torch.optim.SGD([phase], lr=1.0)
    _, optimizer = amp.initialize(linear([[1.0]]), optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    for _ in range(2):
        backward((phase * (3.0 - 4.0j)).real.sum() / 2, optimizer)
    optimizer.step()
    assert phase.tolist() == [-2.0 - 2.0j]
    backward((phase * math.inf).real.sum(), optimizer)
    optimizer.step()
    assert optimizer._amp_stash.step_skipped and phase.tolist() == [-2.0 - 2.0j]


def normed(level="O2", seed=0, **kwargs):
    """Half layers around a batch norm that is kept, which is its own master, and has gradients of its own."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    return amp.initialize(model, sgd(model), opt_level=level, **kwargs)


FOUR = torch.tensor([[1.0, 2.0], [0.5, -1.0], [2.0, 0.0], [-1.0, 1.0]])


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("where", ["all", "a part"])
def test_a_backward_outside_of_scale_loss_after_one_inside_is_warned_about(level, where):
    model, optimizer = normed(level)
    for _ in range(2):
        backward(model(FOUR).sum(), optimizer)
        optimizer.step()  # no warning
        optimizer.zero_grad()
    backward(model(FOUR).sum(), optimizer)
    if where == "all":
        model(FOUR).sum().backward()
    else:
        model[2](FOUR.to(model[2].weight.dtype)).float().sum().backward()
    name = r"0\.weight" if where == "all" else r"2\.weight"
    with pytest.warns(UserWarning, match=rf"{name} has a gradient on the model that was never gathered"):
        optimizer.step()


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_gradients_that_no_warning_is_for(level):
    """Delayed micro-batches, native scaling, a loss of another optimizer before and after the step, cleared ones."""
    (netd, optd), (netg, optg) = normed(level), normed(level, seed=1)
    for training in range(2):  # of two trainings, then of one
        if training:
            (netd, netg), (optd, optg) = amp.initialize([netd, netg], [optd, optg], opt_level=level, num_losses=2)
        for order in (0, 1):
            backward(netd(FOUR).sum() / 64, optd, delay_unscale=True)
            backward(netd(FOUR).sum() / 64, optd)
            if order:
                optd.step()
            backward(netd(netg(FOUR)).sum() / 64, optg)  # fills the discriminator's
            optg.step()
            if not order:
                optd.step()
        optd.zero_grad()
        backward(netd(FOUR).sum() / 64, optd, delay_unscale=True)
        optd.step()
        netd(FOUR).sum().backward()
        netd.zero_grad()
        optd.step()
        optd.step()
        optd.zero_grad()
        scaler = amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(netd(FOUR).sum()).backward()
        scaler.step(optd)
        optd.zero_grad()

"""Gradients that exist before a backward: they are not checked again, are added after it, and may be cleared in it."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import DEVICES
from crossed import crossed
from torch import nn
from training import backward, linear

from amp_patch import amp


def one_loss_overflows(level, device="cpu", delay=False, shared=False):
    """Loss 0 overflows in the first optimizer; loss 1, which is clean, then goes to both. Scales are dynamic."""
    models = [linear([[1.0]], device), linear([[1.0]], device)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    models, optimizers = amp.initialize(models, optimizers, opt_level=level, num_losses=2, verbosity=0)
    backward(models[0](torch.full((1, 1), math.inf, device=device)).sum(), optimizers[0], loss_id=0)
    small = torch.full((1, 1), 0.25, device=device)
    if delay:
        backward((models[0](small) + models[1](small)).sum() / 4, optimizers, loss_id=1, delay_unscale=True)
    backward((models[0](small) + models[1](small)).sum() / 4, optimizers, loss_id=1)
    return models, optimizers


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_overflow_of_one_loss_is_not_blamed_on_another(level, delay, device):
    models, optimizers = one_loss_overflows(level, device, delay)
    states = amp.state_dict()
    assert states["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 0}
    assert states["loss_scaler1"] == {"loss_scale": 2.0**16, "unskipped": 1}
    grads = [next(iter(amp.master_params(optimizer))).grad.item() for optimizer in optimizers]
    assert grads == [math.inf, 0.0625 * (1 + delay)]
    for optimizer in optimizers:
        optimizer.step()
    assert [optimizer._amp_stash.step_skipped for optimizer in optimizers] == [True, False]
    assert [model.weight.item() for model in models] == [1.0, 1 - 0.0625 * (1 + delay)]

    for optimizer, model in zip(optimizers, models, strict=True):
        optimizer.zero_grad()
        backward(model(torch.full((1, 1), 0.25, device=device)).sum() / 4, optimizer, loss_id=0)
        optimizer.step()
        assert not optimizer._amp_stash.step_skipped
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 2}
    assert models[0].weight.item() == 0.9375


def overflowed_earlier(kind, scale=64.0):
    """A parameter that is its own master, with a gradient that overflowed in loss 0, and a clean loss 1 for it."""
    num_losses = {"num_losses": 2, "verbosity": 0, "opt_level": "O1", "loss_scale": scale}
    if kind == "sparse":
        table = nn.Embedding(3, 1, sparse=True)
        nn.init.ones_(table.weight)
        table, optimizer = amp.initialize(table, torch.optim.SGD(table.parameters(), lr=1.0), **num_losses)
        return optimizer, table.weight, lambda by: (table(torch.tensor([1, 1, 2])) * by).sum()
    if kind == "mixed":  # a dense gradient after a sparse one, and the other way round
        table, turns = nn.Embedding(3, 1, sparse=True), iter([True, False, True, False])
        nn.init.ones_(table.weight)
        table, optimizer = amp.initialize(table, torch.optim.SGD(table.parameters(), lr=1.0), **num_losses)

        def loss(by):
            dense = (table.weight[[1, 1, 2]] * by).sum()
            return (table(torch.tensor([1, 1, 2])) * by).sum() if next(turns) else dense

        return optimizer, table.weight, loss
    dtype = torch.complex64 if kind == "complex" else torch.float64 if kind == "double" else torch.float32
    param = nn.Parameter(torch.ones(3, 1, dtype=dtype))
    if kind == "transposed":
        param = nn.Parameter(torch.ones(2, 3).t())
    _, optimizer = amp.initialize(linear([[1.0]]), torch.optim.SGD([param], lr=1.0), **num_losses)
    return optimizer, param, lambda by: (param[[1, 1, 2]] * by).real.sum()


def dense(grad):
    grad = grad.to_dense() if grad.is_sparse else grad
    return (grad.real if grad.is_complex() else grad)[:, 0].tolist()


KINDS = ["dense", "double", "complex", "transposed", "sparse", "mixed"]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.11, once a process
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_kind_are_added_to_an_earlier_overflow_unchecked(kind, delay):
    optimizer, param, loss = overflowed_earlier(kind)
    backward(loss(math.inf), optimizer, loss_id=0)
    backward(loss(2.0), optimizer, loss_id=1, delay_unscale=delay)
    if delay:
        backward(loss(0.5), optimizer, loss_id=1)
    assert dense(param.grad) == [0.0, math.inf, math.inf]
    flags = [found.item() for _, found in optimizer._amp_stash.found]
    assert flags == [1.0, 0.0]
    optimizer.step()
    assert optimizer._amp_stash.step_skipped and param.real.flatten()[0] == 1.0

    optimizer, param, loss = overflowed_earlier(kind)
    backward(loss(3.0), optimizer, loss_id=0)
    backward(loss(2.0), optimizer, loss_id=1, delay_unscale=delay)
    if delay:
        assert dense(param.grad) == [0.0, 2 * 5 * 64.0, 5 * 64.0]  # the whole sum, scaled
        backward(loss(0.5), optimizer, loss_id=1)
    total = 5.5 if delay else 5.0
    assert dense(param.grad) == [0.0, 2 * total, total]
    backward(loss(math.inf), optimizer, loss_id=1)
    assert [found.item() for _, found in optimizer._amp_stash.found] == [0.0, 1.0]


@crossed({"scale": [64.0, 3.0], "bad": [False, True], "kind": KINDS})
def test_an_exception_in_the_body_brings_the_earlier_gradient_back_to_the_bit(kind, bad, scale):
    optimizer, param, loss = overflowed_earlier(kind, scale)
    backward(loss(0.1), optimizer, loss_id=0)
    if bad:
        backward(loss(math.nan), optimizer, loss_id=0)
    else:
        loss(0.1)
    before, grad = param.grad.clone(), param.grad
    with pytest.raises(KeyError), amp.scale_loss(loss(0.2), optimizer, loss_id=1) as scaled_loss:
        scaled_loss.backward()
        raise KeyError
    assert param.grad is grad
    torch.testing.assert_close(param.grad, before, rtol=0, atol=0, equal_nan=True)
    assert [found.item() for _, found in optimizer._amp_stash.found] == [float(bad)]
    assert not optimizer._amp_stash.masters.aside


@pytest.mark.parametrize("accumulates", ["in one buffer", "apart"])
def test_the_gradient_is_the_same_tensor_after_it_was_added_to(accumulates):
    """As in torch, the gradient stays the same tensor for code that holds it or has made it a view of a buffer."""
    model = linear([[1.0, 2.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale=64.0)
    buffer = torch.zeros(4)
    model.weight.grad = grad = buffer[1:3].view(1, 2) if accumulates == "in one buffer" else torch.zeros(1, 2)
    for number in (1, 2):
        backward(model(torch.tensor([[0.5, 0.25]])).sum(), optimizer, delay_unscale=number == 2)
    assert model.weight.grad is grad and grad.tolist() == [[64.0, 32.0]]
    backward(model(torch.tensor([[0.5, 0.25]])).sum(), optimizer)
    assert model.weight.grad is grad and grad.tolist() == [[1.5, 0.75]]
    with pytest.raises(KeyError), amp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
        grad.zero_()  # as a DDP does, whose bucket this may be a part of
        raise KeyError
    if accumulates == "in one buffer":
        assert model.weight.grad is grad and grad.tolist() == [[1.5, 0.75]]
        assert buffer.tolist() == [0.0, 1.5, 0.75, 0.0]


@crossed({"delay": [False, True], "to_none": [True, False], "how": ["optimizer", "model"], "level": ["O1", "O2"]})
def test_gradients_cleared_in_the_body_or_while_they_wait_do_not_come_back(level, how, to_none, delay):
    model = linear([[1.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    clear = optimizer.zero_grad if how == "optimizer" else model.zero_grad

    backward(model(torch.full((1, 1), 3.0)).sum(), optimizer)
    with amp.scale_loss(model(torch.full((1, 1), 0.5)).sum(), optimizer, delay_unscale=delay) as scaled_loss:
        clear(set_to_none=to_none)
        scaled_loss.backward()
    if delay:
        backward(model(torch.full((1, 1), 0.25)).sum(), optimizer)
    assert next(iter(amp.master_params(optimizer))).grad.item() == (0.75 if delay else 0.5)

    optimizer.zero_grad()
    backward(model(torch.full((1, 1), math.inf)).sum(), optimizer)
    backward(model(torch.full((1, 1), 0.5)).sum(), optimizer, delay_unscale=True)
    clear(set_to_none=True)
    backward(model(torch.full((1, 1), 0.25)).sum(), optimizer)
    assert next(iter(amp.master_params(optimizer))).grad.item() == 0.25

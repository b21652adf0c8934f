"""What is held: bytes per parameter, and nothing that grows."""

from __future__ import annotations

import gc

import pytest
import torch
import training
from torch import nn
from training import LEVELS, SGD, backward, convnet

from amp_patch import amp, links


def live_bytes():
    """Bytes of all tensors' storages that Python can reach, each once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not thing.is_sparse:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("make_optimizer", [SGD, training.ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_an_o2_parameter_costs_2_bytes_of_weight_and_4_of_master_and_gradient(level, make_optimizer):
    size = 128 * 1024
    small = 64 * 1024  # scales, step counts, batches: far less than one byte for each parameter
    before = live_bytes()
    model = nn.Linear(128, 1024, bias=False)
    state_bytes = 4 * size if make_optimizer is SGD else 8 * size
    model, optimizer = amp.initialize(model, make_optimizer(model.parameters()), opt_level=level)
    assert live_bytes() - before < 6 * size + small
    for _ in range(2):
        inputs = torch.randn(4, 128)
        loss = model(inputs).square().mean()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        assert model.weight.grad is None
        del scaled_loss, loss
        held = live_bytes() - before
        optimizer.step()
        assert live_bytes() - before < 6 * size + state_bytes + small  # the gradient is freed by the step
        expected = 10 * size if _ == 0 else 10 * size + state_bytes
        assert expected <= held < expected + small


def counts():
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_grows_over_1000_steps(level):
    model = training.linear([[0.5, 0.25]])
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, verbosity=0)
    inputs = torch.ones(1, 2)

    def steps(number):
        for _ in range(number):
            optimizer.zero_grad()
            backward(model(inputs).float().square().mean() / 8, optimizer)
            optimizer.step()
        return counts()

    first = steps(10)
    assert steps(990) <= first


def test_nothing_grows_over_100_evaluations_under_no_grad_at_o1():
    model, inputs = amp.initialize(convnet().eval(), opt_level="O1"), training.images(0)[0]

    def evaluate(number):
        for _ in range(number):
            with torch.no_grad():
                model(inputs)
        return counts()

    first = evaluate(1)
    assert evaluate(100) == first


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_grows_over_20_rounds_of_initialize_and_restore(level):
    def rounds(number):
        for _ in range(number):
            model = convnet()
            model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, loss_scale=8.0)
            training.train(model, optimizer, 1)
            amp.restore()
        del model, optimizer
        return counts()

    first = rounds(2)
    assert rounds(20) == first
    assert len(links._links) == 0


@pytest.mark.parametrize("level", LEVELS)
def test_trainings_that_were_dropped_hold_nothing(level):
    def trainings(number):
        for _ in range(number):
            model = convnet()
            model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level, loss_scale=8.0)
            training.train(model, optimizer, 1)
        del model, optimizer
        return counts()

    first = trainings(2)
    assert trainings(10) <= first
    gc.collect()
    assert len(links._links) == 0

"""Averages of the weights (EMA, SWA) of cast models are those of the FP32 masters, to the bit."""

from __future__ import annotations

import copy

import pytest
import torch
import training
from crossed import crossed
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from training import LEVELS, backward, convnet, images

from amp_patch import amp

CAST = ("O2", "O3", "O5")
MASTERED = ("O2", "O5")
WAYS = {
    "swa": {},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "ema, one by one": {"avg_fn": get_ema_avg_fn(0.9)},
    "with buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
}


def start_average(level, model=None):
    model = convnet() if model is None else model
    return amp.initialize(model, training.SGD(model.parameters()), opt_level=level, loss_scale=64.0)


def step(model, optimizer, number):
    inputs, targets = images(number)
    backward(nn.functional.cross_entropy(model(inputs), targets), optimizer)
    optimizer.step()
    optimizer.zero_grad()


def assert_same(average, expected):
    mine, theirs = average.module.state_dict(), expected.module.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) and mine[name].dtype is theirs[name].dtype for name in mine)


def follow(values, model):
    """`values`, a plain FP32 model, gets what `model` trains."""
    values.load_state_dict({name: value.float() for name, value in model.state_dict().items()})


@crossed({"level": LEVELS, "way": list(WAYS)}, meet=1)
def test_averagedmodel_averages_the_masters_in_fp32(level, way):
    values = convnet()
    expected = AveragedModel(values, **WAYS[way])
    model, optimizer = start_average(level)
    average = AveragedModel(model, **WAYS[way])
    assert all(p.dtype is torch.float32 for p in average.parameters())
    for number in range(4):
        step(model, optimizer, number)
        average.update_parameters(model)
        follow(values, model)
        expected.update_parameters(values)
    assert_same(average, expected)
    if level in CAST:  # else it is a copy like any other, and keeps its casts
        inputs, _ = images(0)
        with torch.no_grad():
            assert torch.equal(average.eval()(inputs), expected.eval()(inputs))


@pytest.mark.parametrize("level", CAST)
def test_an_average_from_before_initialize_goes_on(level):
    model = convnet()
    average, values = AveragedModel(model), copy.deepcopy(model)
    expected = AveragedModel(values)
    model, optimizer = start_average(level, model)
    for number in range(3):
        step(model, optimizer, number)
        average.update_parameters(model)
        follow(values, model)
        expected.update_parameters(values)
    assert_same(average, expected)


@pytest.mark.parametrize("level", MASTERED)
def test_masters_stay_out_of_the_average(level):
    model, optimizer = start_average(level)
    before = training.weights(model)
    average = AveragedModel(model)
    average.update_parameters(model)
    with torch.no_grad():
        for p in average.parameters():
            p.add_(1.0)
    assert training.same(training.weights(model), before)
    step(model, optimizer, 0)


def test_other_models_are_averaged_by_torch_and_restore_restores_its_class():
    names = ("__init__", "update_parameters")
    before = [vars(AveragedModel)[name] for name in names]
    start_average("O2")
    assert [vars(AveragedModel)[name] for name in names] != before
    plain = convnet(seed=3).to(torch.bfloat16)
    average = AveragedModel(plain)
    average.update_parameters(plain)
    assert all(torch.equal(a, b) for a, b in zip(average.module.parameters(), plain.parameters(), strict=True))
    assert next(average.parameters()).dtype is torch.bfloat16
    amp.restore()
    assert [vars(AveragedModel)[name] for name in names] == before

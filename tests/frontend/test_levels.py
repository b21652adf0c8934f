"""The promises of each opt level: the bits of FP32 at O0, dtypes, resume, interleaving, restore."""

from __future__ import annotations

import io

import pytest
import torch
import training
from torch import nn
from training import ADAM, ADAMW, SGD, convnet, same, train, weights

from amp_patch import amp

OPTIMIZERS = [pytest.param(SGD, id="sgd"), pytest.param(ADAM, id="adam"), pytest.param(ADAMW, id="adamw")]


def plain_run(make_optimizer, steps=20):
    """The script as it is without amp_patch."""
    model = convnet()
    optimizer = make_optimizer(model.parameters())
    for step in range(steps):
        inputs, targets = training.images(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
def test_o0_is_bit_identical_to_the_script_without_amp_patch(make_optimizer):
    expected = plain_run(make_optimizer)
    model = convnet()
    model, optimizer = amp.initialize(model, make_optimizer(model.parameters()), opt_level="O0")
    train(model, optimizer, 20)
    assert same(weights(model), expected)


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
def test_enabled_false_makes_every_call_a_no_op(make_optimizer):
    expected = plain_run(make_optimizer)
    model = convnet()
    optimizer = make_optimizer(model.parameters())
    classes = type(model), type(optimizer)
    assert amp.initialize(model, optimizer, enabled=False, opt_level="O2") == (model, optimizer)
    assert (type(model), type(optimizer)) == classes
    loss = torch.tensor(2.0)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        assert scaled_loss is loss
    train(model, optimizer, 20)
    assert same(weights(model), expected)
    assert amp.initialize(model, enabled=False) is model


@pytest.mark.parametrize(
    ("level", "conv", "norm", "output"),
    [
        ("O0", torch.float32, torch.float32, torch.float32),
        ("O1", torch.float32, torch.float32, torch.float16),
        ("O2", torch.float16, torch.float32, torch.float32),
        ("O3", torch.float16, torch.float16, torch.float32),
        ("O4", torch.float32, torch.float32, torch.bfloat16),
        ("O5", torch.bfloat16, torch.float32, torch.float32),
    ],
)
def test_the_table_of_levels_holds_for_a_model(level, conv, norm, output):
    model = convnet()
    model, optimizer = amp.initialize(model, SGD(model.parameters()), opt_level=level)
    assert model.body[0].weight.dtype is conv
    assert model.body[1].weight.dtype is model.body[1].running_mean.dtype is norm
    assert model(training.images(0)[0]).dtype is output
    held = {p.dtype for p in amp.master_params(optimizer)}
    assert held == ({torch.float16} if level == "O3" else {torch.float32})


def save(model, optimizer):
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def load(saved, model, optimizer):
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    amp.load_state_dict(saved["amp"])


def trainings(seeds):
    """Start a training for each level by a separate `initialize`, with scales that become different."""
    made = {}
    for level, seed in zip(("O1", "O2"), seeds, strict=True):
        model = convnet(seed)
        made[level] = amp.initialize(model, ADAM(model.parameters()), opt_level=level, verbosity=0)
    return made


def test_the_scales_of_optimizers_that_have_none_in_common_are_refused_by_name():
    (_, first), (_, second) = trainings((0, 1)).values()
    state = amp.state_dict(first)
    for call, name in ((amp.state_dict, "state_dict"), (lambda o: amp.load_state_dict(state, o), "load_state_dict")):
        with pytest.raises(ValueError) as refused:
            call([first, second])
        assert str(refused.value) == (
            f"{name}: these optimizers belong to 2 trainings, whose loss scales are saved and loaded apart; call "
            f"{name} for the optimizers of one initialize() call at a time"
        )
        with pytest.raises(RuntimeError) as unknown:
            call(SGD(convnet().parameters()))
        assert str(unknown.value) == (
            f"{name}: this SGD never went through initialize(); call `model, optimizer = amp.initialize(model, "
            "optimizer, opt_level=...)` first"
        )

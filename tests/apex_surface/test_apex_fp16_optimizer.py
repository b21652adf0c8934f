"""apex.fp16_utils.FP16_Optimizer."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from apexed import LOW
from conftest import DEVICES
from torch import nn

from amp_patch.apex.fp16_utils import *  # noqa: F403  scripts do, and it must give everything
from amp_patch.apex.fp16_utils import (
    FP16_Optimizer,
)


def grads_of(optimizer):
    return [[None if p.grad is None else p.grad.data for p in group["params"]] for group in optimizer.param_groups]


def layer(dtype, device="cpu"):
    """A low-precision layer and an FP32 one behind it; numbers that make every gradient exact."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False).to(dtype), nn.Linear(2, 1, bias=False)).to(device)
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0, 0.5], [-0.5, 1.0]]))
        model[1].weight.copy_(torch.tensor([[1.0, 2.0]]))
    return model


def loss_of(model, x=(1.0, 2.0), factor=1.0):
    device, dtype = model[0].weight.device, model[0].weight.dtype
    hidden = model[0](torch.tensor([x], device=device, dtype=dtype))
    return (model[1](hidden.to(model[1].weight.dtype)) * factor).sum()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=2.0**-10, momentum=0.5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"static_loss_scale": 128.0},
        {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 64.0, "scale_window": 2}, "verbose": False},
    ],
)
def test_the_masters_do_what_the_optimizer_does_to_fp32_weights(device, dtype, kwargs):
    model, plain = layer(dtype, device), layer(torch.float32, device)
    optimizer, plain_optimizer = FP16_Optimizer(sgd(model), **kwargs), sgd(plain)
    for step in range(5):
        optimizer.zero_grad(set_grads_to_None=step % 2 == 0)
        plain_optimizer.zero_grad()
        optimizer.backward(loss_of(model))
        loss_of(plain).backward()
        if dtype is torch.float32 or step == 0:  # later on the roundings of the weights differ
            for mine, theirs in zip(grads_of(optimizer)[0], plain.parameters(), strict=True):
                assert mine.dtype is torch.float32 and torch.equal(mine, theirs.grad)
        optimizer.step()
        plain_optimizer.step()
        assert not optimizer.overflow
        masters = optimizer.param_groups[0]["params"]
        torch.testing.assert_close(list(masters), list(plain.parameters()), rtol=1e-4, atol=1e-4)
        assert torch.equal(model[0].weight, masters[0].to(dtype))
        assert model[1].weight is masters[1]


@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
def test_gradients_add_up_over_backwards_also_when_the_scale_moves_between(dtype):
    model, plain = layer(dtype), layer(torch.float32)
    optimizer = FP16_Optimizer(
        sgd(model), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 4.0, "scale_window": 1}
    )
    for x in ((1.0, 2.0), (2.0, 1.0)):
        optimizer.backward(loss_of(model, x))
        loss_of(plain, x).backward()
    assert optimizer.loss_scale == 16.0
    optimizer.backward(loss_of(model), update_master_grads=False)
    optimizer.backward(loss_of(model), update_master_grads=False)
    optimizer.update_master_grads()
    for _ in range(2):
        loss_of(plain).backward()
    assert [g.tolist() for g in grads_of(optimizer)[0]] == [p.grad.tolist() for p in plain.parameters()]


@pytest.mark.parametrize("dtype", LOW)
def test_an_overflow_changes_nothing_and_the_next_step_goes_on(dtype, caplog):
    model = layer(dtype)
    optimizer = FP16_Optimizer(sgd(model), dynamic_loss_scale=True)
    assert optimizer.loss_scale == 65536.0
    optimizer.loss_scale = 128.0
    optimizer.backward(loss_of(model))
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.optimizer.state_dict()))
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, factor=math.inf))
    assert optimizer.overflow and optimizer.loss_scale == 64.0
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.step() is None
    assert "loss scale is now 64" in caplog.text
    after = model.state_dict(), optimizer.optimizer.state_dict()
    assert all(torch.equal(before[0][k], after[0][k]) for k in before[0])
    assert str(before[1]) == str(after[1])
    model.zero_grad()  # only the model's, as scripts do
    optimizer.backward(loss_of(model))
    assert not optimizer.overflow
    optimizer.step()
    assert not torch.equal(before[0]["1.weight"], model[1].weight)


def test_clipping_is_of_the_masters():
    model = layer(torch.float16)
    optimizer = FP16_Optimizer(sgd(model), static_loss_scale=64.0)
    optimizer.backward(loss_of(model))
    grads = grads_of(optimizer)[0]
    norm = torch.cat([g.flatten() for g in grads]).norm()
    assert optimizer.clip_master_grads(1.0) == norm
    torch.testing.assert_close(torch.cat([g.flatten() for g in grads]).norm(), torch.tensor(1.0))
    assert optimizer.clip_master_grads(100.0, norm_type=math.inf) <= 1.0


def test_a_closure_is_refused_before_it_is_called():
    optimizer = FP16_Optimizer(sgd(layer(torch.float16)))
    with pytest.raises(RuntimeError, match=r"FP16_Optimizer\.step: a closure .* call the closure's body first"):
        optimizer.step(lambda: pytest.fail("it was called"))


@pytest.mark.parametrize("dtype", LOW)
def test_resuming_is_exact(dtype):
    def make():
        model = layer(dtype)
        return model, FP16_Optimizer(sgd(model), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 64.0})

    def train(model, optimizer):
        optimizer.zero_grad()
        optimizer.backward(loss_of(model))
        optimizer.step()

    model, optimizer = make()
    train(model, optimizer)
    optimizer.loss_scaler.last_overflow_iter = 7
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)  # plain types: not refused by its default, weights_only
    twin, twins_optimizer = make()
    twin.load_state_dict(saved["model"])
    twins_optimizer.load_state_dict(saved["optimizer"])
    assert vars(twins_optimizer.loss_scaler) == vars(optimizer.loss_scaler)
    for _ in range(2):
        train(model, optimizer)
        train(twin, twins_optimizer)
    assert all(
        torch.equal(a, b)
        for a, b in zip(*(o.param_groups[0]["params"] for o in (optimizer, twins_optimizer)), strict=True)
    )
    assert str(twins_optimizer.state_dict()) == str(optimizer.state_dict())
    other = FP16_Optimizer(sgd(nn.Linear(3, 3).to(dtype)))
    with pytest.raises(ValueError, match=r"masters have shapes \[\[\(2, 2\)\]\] in the state"):
        other.load_state_dict(saved["optimizer"])


def test_a_checkpoint_of_apex_s_is_understood():
    class Scaler:  # amp.scaler.LossScaler, which Apex pickled whole
        _loss_scale = None

    model = layer(torch.float16)
    optimizer = FP16_Optimizer(sgd(model), dynamic_loss_scale=True)
    state = optimizer.state_dict()
    state["loss_scaler"] = Scaler()
    state["loss_scaler"]._loss_scale = 4.0
    optimizer.load_state_dict(state)
    assert optimizer.loss_scale == 4.0


def test_weights_loaded_into_the_model_alone_reach_the_masters():
    model = layer(torch.float16)
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    optimizer.backward(loss_of(model))
    optimizer.step()
    assert model[0].weight.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_state_from_before_wrapping_moves_to_the_masters():
    model = layer(torch.float16)
    inner = sgd(model)
    loss_of(model).backward()
    inner.step()
    optimizer = FP16_Optimizer(inner)
    master = optimizer.all_fp32_from_fp16_params[0]
    assert optimizer.state[master]["momentum_buffer"].dtype is torch.float32
    assert model[0].weight not in optimizer.state

"""Gradients through scale_loss: units, accumulation, several losses, models and optimizers, edits by the user."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import DEVICES
from small_trainings import EVERY, SCALED, master_grads, setup, sgd, x
from torch import nn
from training import backward, linear

from amp_patch import amp


def quarter(model, *values):
    """Return a loss so small that its scaled gradients are finite in FP16: the initial scale of 2**16 itself is not."""
    return model(x(*values)).sum() / 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", SCALED)
@pytest.mark.parametrize("loss_scale", ["dynamic", "128.0", 3, 2.0**-10])
def test_gradients_in_the_body_are_scaled_and_after_it_are_not(level, loss_scale, device):
    model, optimizer = setup(level, device=device, loss_scale=loss_scale)
    scale = 65536.0 if loss_scale == "dynamic" else float(loss_scale)
    with amp.scale_loss(model(x(1.0, 2.0, device=device)).sum() / 4, optimizer) as scaled_loss:
        assert scaled_loss.item() == 1.25 * scale and scaled_loss.dtype is torch.float32
        scaled_loss.backward()
        assert model.weight.grad.tolist() == [[0.25 * scale, 0.5 * scale]]
    assert master_grads(optimizer) == [[[0.25, 0.5]]]
    assert all(p.grad.dtype is torch.float32 for p in amp.master_params(optimizer))
    if level == "O2":
        assert model.weight.grad is next(amp.master_params(optimizer)).grad
    optimizer.step()
    assert model.weight.tolist() == [[0.75, 1.5]]


@pytest.mark.parametrize("level", SCALED)
def test_a_loss_that_overflows_twice_before_one_step_moves_its_scale_once(level):
    model, optimizer = setup(level, verbosity=0, loss_scale="dynamic")
    for _ in range(2):
        backward(quarter(model, math.inf, 2.0), optimizer)
    optimizer.step()
    assert optimizer._amp_stash.step_skipped
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 32768.0


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (1.5, TypeError, "loss is a float"),
        (torch.tensor(3), TypeError, "loss is a tensor of torch.int64"),
        (None, TypeError, "loss is a NoneType"),
    ],
)
def test_a_loss_that_cannot_be_is_refused(loss, error, words):
    _, optimizer = setup("O2")
    with pytest.raises(error, match=words), amp.scale_loss(loss, optimizer):
        pass


@pytest.mark.parametrize(
    ("loss_id", "way_out"),
    [(1, "give initialize num_losses=2"), (4, "give initialize num_losses=5")]
    + [(wrong, "wanted an integer from 0 to 0") for wrong in (-1, "0", True, None)],
)
def test_a_loss_id_out_of_range_is_refused(loss_id, way_out):
    model, optimizer = setup("O2")
    words = f"^scale_loss: loss_id is {loss_id!r}, and initialize was given num_losses=1; {way_out}$"
    with pytest.raises(ValueError, match=words), amp.scale_loss(model(x(1.0, 1.0)).sum(), optimizer, loss_id):
        pass
    backward(model(x(1.0, 1.0)).sum(), optimizer)  # nothing was left behind


def test_an_optimizer_that_was_never_initialized_is_named():
    model = linear([[1.0]])
    with pytest.raises(RuntimeError, match=r"this SGD never went through initialize\(\)"):
        backward(model(x(1.0)).sum(), sgd(model))
    with pytest.raises(TypeError, match="optimizers is empty"):
        backward(model(x(1.0)).sum(), [])


def test_state_dict_is_written_into_a_destination_and_unknown_keys_are_refused():
    setup("O2", num_losses=2)
    destination = {}
    assert amp.state_dict(destination) is destination and list(destination) == ["loss_scaler0", "loss_scaler1"]
    with pytest.raises(RuntimeError, match="unexpected keys 'model'"):
        amp.load_state_dict({**destination, "model": {}})
    with pytest.raises(RuntimeError, match=r"a loss scaler has \['loss_scale'\]; wanted loss_scale and unskipped"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0}})
    amp.load_state_dict({"loss_scaler1": {"loss_scale": 4.0, "unskipped": 7}})
    assert amp.state_dict()["loss_scaler1"] == {"loss_scale": 4.0, "unskipped": 7}
    with pytest.raises(TypeError):
        amp.load_state_dict(destination, strict=False)


def test_scales_loaded_before_initialize_are_refused():
    state = {"loss_scaler0": {"loss_scale": 4.0, "unskipped": 7}}
    words = r"^load_state_dict: there is no training .*; call amp.initialize\(...\) first, then amp.load_state_dict"
    with pytest.raises(RuntimeError, match=words):
        amp.load_state_dict(state)
    model = linear([[1.0]])
    amp.initialize(model, sgd(model), opt_level="O2")
    amp.load_state_dict(state)
    assert amp.state_dict() == state
    amp.restore()
    with pytest.raises(RuntimeError, match="there is no training"):
        amp.load_state_dict(state)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, "high"])
def test_a_loaded_scale_that_cannot_be_is_refused_before_anything_is_loaded(value):
    setup("O2", num_losses=2, loss_scale="dynamic")
    before = amp.state_dict()
    state = {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}, "loss_scaler1": {"loss_scale": value, "unskipped": 0}}
    with pytest.raises(ValueError, match="load_state_dict: loss_scale is"):
        amp.load_state_dict(state)
    assert amp.state_dict() == before


@pytest.mark.parametrize("level", SCALED)
def test_a_body_unscales_by_the_scale_that_it_multiplied_by(level):
    first, second = linear([[1.0]]), linear([[1.0]])
    (first, second), (opta, optb) = amp.initialize(
        [first, second], [sgd(first), sgd(second)], opt_level=level, verbosity=0
    )
    with amp.scale_loss(first(x(0.5)).sum() / 4, opta) as scaled_loss:
        backward(second(x(math.inf)).sum(), optb)  # moves the scale that both losses have
        scaled_loss.backward()
    assert master_grads(opta) == [[[0.125]]]

    backward(first(x(0.5)).sum() / 4, opta, delay_unscale=True)
    backward(second(x(math.inf)).sum(), optb)
    opta.step()
    assert first.weight.item() == 1 - 0.25


@pytest.mark.parametrize("level", EVERY)
def test_a_body_inside_a_body_of_the_same_optimizer_is_refused(level):
    model, optimizer = setup(level, num_losses=2)
    with amp.scale_loss(model(x(0.5, 1.0)).sum(), optimizer) as outer:
        with pytest.raises(RuntimeError, match="body of another scale_loss"):
            backward(model(x(0.5, 1.0)).sum(), optimizer, loss_id=1)
        outer.backward()
    assert master_grads(optimizer) == [[[0.5, 1.0]]]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_scale_is_read_when_the_body_begins(level):
    model, optimizer = setup(level, loss_scale="dynamic")
    first, second = (amp.scale_loss(quarter(model, 1.0, 2.0), optimizer) for _ in range(2))
    with first as scaled_loss:
        (scaled_loss * math.inf).backward()
    with second as scaled_loss:
        assert scaled_loss.item() == 1.25 * 32768.0
    with pytest.raises(RuntimeError, match="was entered before"), second:
        pass


@pytest.mark.parametrize("when", ["before", "after"])
def test_zero_grad_that_a_script_has_put_into_torch_s_class_is_called(when, monkeypatch):
    calls, original = [], torch.optim.Optimizer.zero_grad

    def zero_grad(self, set_to_none=True):
        calls.append(1)
        original(self, set_to_none)

    if when == "before":
        monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", zero_grad)
    _, optimizer = setup("O1")
    if when == "after":
        monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", zero_grad)
    optimizer.zero_grad()
    assert calls == [1]


def test_loss_scale_is_one_without_scaling():
    for settings in ({"opt_level": "O0"}, {"opt_level": "O5"}, {"enabled": False}):
        model = nn.Linear(1, 1)
        model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), **settings)
        assert amp.loss_scale(optimizer).item() == 1.0


def test_loss_scale_refuses_by_name():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(RuntimeError, match=r"loss_scale: this SGD never went through initialize\(\)"):
        amp.loss_scale(optimizer)
    with pytest.raises(TypeError, match="loss_scale: optimizers is empty"):
        amp.loss_scale([])
    amp.initialize(model, optimizer)
    with pytest.raises(ValueError, match="loss_scale: loss_id is 1"):
        amp.loss_scale(optimizer, 1)

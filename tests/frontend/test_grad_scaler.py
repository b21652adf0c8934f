"""GradScaler against torch.amp.GradScaler, and what it adds."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from conftest import DEVICES
from scaled_loops import INF, iterate, model_and_optimizer, scalers

from amp_patch import amp


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_run_with_overflows_is_torch_s_to_the_bit(device, fused, unscale):
    runs = []
    for scaler in scalers(device, init_scale=2.0**10, growth_interval=3):
        model, optimizer = model_and_optimizer(device, fused=fused)
        scales = []
        for turn in range(12):
            iterate(scaler, model, optimizer, overflow=turn in (2, 3, 9), unscale=unscale)
            scales.append((scaler.get_scale(), scaler._get_growth_tracker()))
        runs.append((scales, model.weight.detach().clone(), scaler.state_dict()))
    (scales, weight, state), (our_scales, our_weight, our_state) = runs
    assert our_scales == scales and our_state == state
    assert torch.equal(our_weight, weight)
    assert len({scale for scale, _ in scales}) == 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_of_initialize_at_O2_gets_its_masters_gradients(device, fused):
    model, optimizer = model_and_optimizer(device, fused=fused)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
    scaler, plain = amp.GradScaler(device, init_scale=8.0), amp.GradScaler(device, enabled=False)
    for overflow in (False, True, False):
        iterate(scaler, model, optimizer, overflow=overflow)
        if not overflow:
            iterate(plain, twin, twin_optimizer)
    for master, weight in zip(amp.master_params(optimizer), twin.parameters(), strict=True):
        assert master.dtype is torch.float32 and torch.equal(master, weight)
    assert torch.equal(model.weight, twin.weight.half())


def test_step_reports_whether_it_stepped():
    model, optimizer = model_and_optimizer()
    scaler = amp.GradScaler("cpu")
    assert iterate(scaler, model, optimizer) is True
    assert iterate(scaler, model, optimizer, overflow=True) is False
    assert iterate(amp.GradScaler("cpu", enabled=False), model, optimizer) is True


@pytest.mark.parametrize("device", DEVICES)
def test_an_optimizer_that_skips_on_the_device_reports_there(device):
    model, optimizer = model_and_optimizer(device, fused=True)
    scaler = amp.GradScaler(device)
    for overflow in (False, True):
        before = model.weight.detach().clone()
        stepped = iterate(scaler, model, optimizer, overflow=overflow)
        assert isinstance(stepped, torch.Tensor) and stepped.dtype is torch.bool
        assert bool(stepped) is not overflow
        assert torch.equal(before, model.weight) is overflow


def test_bounds_hold_the_scale():
    model, optimizer = model_and_optimizer()
    scaler = amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=1, min_scale=64.0, max_scale=256.0)
    assert scaler.get_scale() == 256.0
    iterate(scaler, model, optimizer)
    assert scaler.get_scale() == 256.0
    for _ in range(4):
        iterate(scaler, model, optimizer, overflow=True)
    assert scaler.get_scale() == 64.0


def test_hysteresis_waits():
    model, optimizer = model_and_optimizer()
    scaler = amp.GradScaler("cpu", init_scale=64.0, hysteresis=3)
    for _ in range(2):
        iterate(scaler, model, optimizer, overflow=True)
    assert scaler.get_scale() == 64.0
    assert iterate(scaler, model, optimizer, overflow=True) is False
    assert scaler.get_scale() == 32.0
    fresh = amp.GradScaler("cpu", init_scale=64.0, hysteresis=3)
    for overflow in (True, True, False, True, True):
        iterate(fresh, model, optimizer, overflow=overflow)
    assert fresh.get_scale() == 64.0


def test_errors_are_torch_s():
    model, optimizer = model_and_optimizer()
    for scaler in scalers():
        for call in (scaler.unscale_, scaler.step):
            with pytest.raises(AssertionError, match=r"did not use scaler\.scale"):
                call(optimizer)
        with pytest.raises(AssertionError, match=r"did not use scaler\.scale"):
            scaler.update()
        scaler.scale(model(torch.ones(1, 3)).sum()).backward()
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.update()
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"update\(\)"):
            scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"after step\(\)"):
            scaler.unscale_(optimizer)
        with pytest.raises(AssertionError, match="may only be pickled"):
            pickle.dumps(scaler)
        with pytest.raises(AssertionError, match="growth factor"):
            type(scaler)("cpu", growth_factor=1.0)


def test_a_closure_is_refused_however_it_is_given():
    model, optimizer = model_and_optimizer()
    scaler = amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    for args, kwargs in (((lambda: 0.0,), {}), ((), {"closure": lambda: 0.0})):
        with pytest.raises(RuntimeError, match="closure"):
            scaler.step(optimizer, *args, **kwargs)
    assert scaler.step(optimizer, closure=None) is True


def test_a_disabled_scaler_does_nothing():
    scaler = amp.GradScaler("cpu", enabled=False)
    loss = torch.ones(())
    assert scaler.scale(loss) is loss and scaler.get_scale() == 1.0 and not scaler.is_enabled()
    assert scaler.state_dict() == {}
    scaler.update()


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"min_scale": 0.0}, ValueError, "min_scale is 0.0"),
        ({"max_scale": INF}, ValueError, "max_scale is inf"),
        ({"min_scale": 8.0, "max_scale": 4.0}, ValueError, "above"),
        ({"hysteresis": 0}, ValueError, "hysteresis is 0"),
        ({"device": 65536.0}, TypeError, "init_scale=65536.0"),
    ],
)
def test_arguments_that_cannot_be(arguments, error, said):
    with pytest.raises(error, match=said):
        amp.GradScaler(**{"device": "cpu", **arguments})

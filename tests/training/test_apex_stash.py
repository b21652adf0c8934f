"""Apex's state that scripts read: the stash of an optimizer, state dicts, properties."""

from __future__ import annotations

import copy
import importlib
import math

import pytest
import torch
from apexed import INF, LEVELS, apex_amp, backward_by, make, train_by  # noqa: F401  the fixture `amp`
from torch import nn
from training import ADAM, convnet, linear, same, weights


@pytest.mark.parametrize("level", LEVELS)
def test_state_dict_round_trip(amp, level, caplog):
    make(amp, level, num_losses=2, loss_scale="dynamic")
    amp._amp_state.loss_scalers[1]._loss_scale, amp._amp_state.loss_scalers[1]._unskipped = 8.0, 5
    destination = {}
    state = amp.state_dict(destination)
    assert state is destination and state == {
        "loss_scaler0": {"loss_scale": 2.0**16, "unskipped": 0},
        "loss_scaler1": {"loss_scale": 8.0, "unskipped": 5},
    }
    make(amp, level, num_losses=3, loss_scale="dynamic")
    amp.load_state_dict(state)
    assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [2.0**16, 8.0, 2.0**16]
    with pytest.raises(RuntimeError, match="unexpected keys 'surprise'"):
        amp.load_state_dict({**state, "surprise": 1})


def test_the_stash_lists_parameters_and_masters_in_the_order_of_the_groups(amp):
    model = convnet()
    groups = [{"params": model.head.parameters()}, {"params": model.body.parameters()}]
    model, optimizer = amp.initialize(model, torch.optim.SGD(groups, lr=0.1), opt_level="O2")
    optimizer._amp_lazy_init()
    stash = optimizer._amp_stash
    halves, masters = stash.all_fp16_params, stash.all_fp32_from_fp16_params
    expected = [p for m in (model.head, model.body) for p in m.parameters() if p.dtype is torch.float16]
    assert list(map(id, halves)) == list(map(id, expected)) and len(masters) == len(halves)
    assert all(torch.equal(m.half(), p) and m.dtype is torch.float32 for p, m in zip(halves, masters, strict=True))
    own = [p for p in model.parameters() if p.dtype is torch.float32]
    assert list(map(id, stash.all_fp32_from_fp32_params)) == list(map(id, own)) and len(own) == 2
    for flat, groups in (
        (halves, stash.fp16_groups),
        (masters, stash.fp32_from_fp16_groups),
        (own, stash.fp32_from_fp32_groups),
    ):
        assert len(groups) == 2 and [id(p) for group in groups for p in group] == list(map(id, flat))
    added = nn.Parameter(torch.ones(2).half())
    optimizer.add_param_group({"params": [added]})
    assert stash.all_fp16_params[-1] is added
    model.head.requires_grad_(False)
    assert len(stash.all_fp16_params) == len(stash.all_fp32_from_fp16_params) == len(halves) - 1
    for parameter in stash.all_fp32_from_fp16_params:
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad = None
    assert not hasattr(stash, "all_fp32_params")


@pytest.mark.parametrize("level", ["O0", "O1", "O3"])
def test_without_masters_the_stash_has_no_lists_of_them(amp, level):
    """fairseq's SlowMo asks hasattr(stash, "fp16_groups")."""
    _model, optimizer = make(amp, level)
    stash = optimizer._amp_stash
    assert not hasattr(stash, "fp16_groups") and not hasattr(stash, "all_fp32_from_fp16_params")
    assert len(stash.all_fp16_params) == (level == "O3") and len(stash.all_fp32_params) == (level != "O3")


@pytest.mark.parametrize("level", LEVELS)
def test_resume_as_nvidias_bert_does(amp, level):
    """The model before initialize; then the optimizer twice around lazy init; then the masters by value."""

    def fresh(checkpoint=None):
        model = convnet()
        if checkpoint is not None:
            model.load_state_dict(checkpoint["model"], strict=False)
        optimizer = ADAM(model.parameters())
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic")
        amp._amp_state.loss_scalers[0]._loss_scale = 2.0**12
        return model, optimizer

    model, optimizer = fresh()
    train_by(amp, model, optimizer, 5)
    checkpoint = copy.deepcopy(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "master params": list(amp.master_params(optimizer)),
            "amp": amp.state_dict(),
        }
    )
    expected = train_by(amp, model, optimizer, 5)

    resumed, optimizer = fresh(checkpoint)
    optimizer.load_state_dict(checkpoint["optimizer"])
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    optimizer.load_state_dict(checkpoint["optimizer"])
    for param, saved_param in zip(amp.master_params(optimizer), checkpoint["master params"], strict=True):
        param.data.copy_(saved_param.data)
    amp.load_state_dict(checkpoint["amp"])
    assert train_by(amp, resumed, optimizer, 5) == expected
    assert same(weights(resumed), weights(model))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_shows_in_the_scaler_and_in_the_stash_until_it_is_over(amp, level):
    """NVIDIA's BERT counts steps by `_has_overflow` after the step; other scripts read `already_patched` before it."""
    model, optimizer = make(amp, level)
    loss_scaler = amp._amp_state.loss_scalers[0]
    for grad, overflow in ((0.125, False), (INF, True), (0.125, False)):
        before = model.weight.item()
        optimizer.zero_grad()
        backward_by(amp, model, optimizer, grad)
        assert optimizer._amp_stash.already_patched is overflow
        optimizer.step()
        assert optimizer._amp_stash.already_patched is False
        assert loss_scaler._has_overflow is overflow and bool(loss_scaler._overflow_buf.item()) is overflow
        assert (model.weight.item() == before) is overflow


def test_already_patched_can_be_written(amp):
    model = linear([[1.0]])
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.25), opt_level="O2", verbosity=0)
    for factor, written, moved in ((1.0, True, 0.0), (1.0, False, 0.25)):
        with amp.scale_loss(model(torch.ones(1, 1)).sum() * factor, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer._amp_stash.already_patched = written
        assert optimizer._amp_stash.already_patched is written
        optimizer.step()
        assert model.weight.item() == 1.0 - moved


def test_masters_written_by_the_script_are_published(amp):
    """BMUF averages amp.master_params through .data, which no version counter tells."""
    model, optimizer = make(amp, "O2")
    for param in amp.master_params(optimizer):
        param.data.copy_(param + 2.0)
    if hasattr(optimizer, "_master_params_to_model_params"):
        optimizer._master_params_to_model_params()
    assert model.weight.item() == 3.0
    backward_by(amp, model, optimizer, 0.5)
    optimizer.step()
    assert model.weight.item() == 2.875


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("overflow", [False, True])
def test_a_scale_loss_of_the_scripts_own_on_the_private_methods(amp, level, overflow):
    """Prepare, backward, clear, post; the second micro-batch adds up."""
    _amp_state = importlib.import_module("apex.amp._amp_state")._amp_state
    model, optimizer = make(amp, level, loss_scale=4.0)
    loss_scaler = _amp_state.loss_scalers[0]
    for micro in range(2):
        loss = model(torch.ones(1, 1)).sum()
        if not optimizer._amp_stash.params_have_scaled_gradients:
            optimizer._prepare_amp_backward()
        (loss.float() * loss_scaler.loss_scale() * (INF if overflow and micro else 1.0)).backward()
        loss_scaler.clear_overflow_state()
        optimizer._post_amp_backward(loss_scaler)
        optimizer._amp_stash.params_have_scaled_gradients = False
        if _amp_state.opt_properties.patch_torch_functions:
            _amp_state.handle._clear_cache()
    (master,) = amp.master_params(optimizer)
    assert master.grad.item() == (INF if overflow else 2.0)
    optimizer.step()
    assert model.weight.item() == (1.0 if overflow else 0.5)


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_that_a_script_flags_as_scaled_are_unscaled_by_the_step(amp, level):
    model, optimizer = make(amp, level, loss_scale=4.0)
    backward_by(amp, model, optimizer, 1.0, delay_unscale=True)
    stash = optimizer._amp_stash
    assert stash.params_have_scaled_gradients is True
    stash.params_have_scaled_gradients = False
    assert stash.params_have_scaled_gradients is False
    stash.params_have_scaled_gradients = True
    optimizer.step()
    assert model.weight.item() == 0.75


@pytest.mark.parametrize(
    ("level", "cast", "patch", "keep", "masters", "scale"),
    [
        ("O0", torch.float32, False, None, False, 1.0),
        ("O1", None, True, None, None, "dynamic"),
        ("O2", torch.float16, False, True, True, "dynamic"),
        ("O3", torch.float16, False, False, False, 1.0),
        ("O4", None, True, None, None, 1.0),
        ("O5", torch.bfloat16, False, True, True, 1.0),
    ],
)
def test_opt_properties_say_what_apexs_say(amp, level, cast, patch, keep, masters, scale):
    make(amp, level)
    properties = amp._amp_state.opt_properties
    options = {
        "enabled": True,
        "opt_level": level,
        "cast_model_type": cast,
        "patch_torch_functions": patch,
        "keep_batchnorm_fp32": keep,
        "master_weights": masters,
        "loss_scale": scale,
    }
    assert properties.options == options
    assert {name: getattr(properties, name) for name in options} == options
    assert properties.options.get("cast_model_outputs", torch.float32) is torch.float32  # Catalyst


def test_an_overflow_before_a_scale_was_written_is_not_charged_to_the_next_iteration(amp):
    model = linear([[1.0]])
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.25), opt_level="O1", verbosity=0)
    scaler = amp._amp_state.loss_scalers[0]
    with amp.scale_loss(model(torch.ones(1, 1)).sum() * math.inf, optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    scaler._loss_scale = 2.0**12
    optimizer.step()
    assert scaler._has_overflow and model.weight.item() == 1.0
    after = scaler.loss_scale()
    optimizer.zero_grad()
    with amp.scale_loss(model(torch.ones(1, 1)).sum(), optimizer) as scaled_loss:
        scaled_loss.backward()
    assert scaler.loss_scale() == after and scaler._unskipped == 1 and not scaler._has_overflow

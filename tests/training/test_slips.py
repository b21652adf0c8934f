"""Mistakes in a training loop: each is reported in the first iteration; correct loops train as before."""

from __future__ import annotations

import copy
import gc
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conftest import DEVICES
from torch import Tensor, nn
from training import backward, linear

from amp_patch import amp

SCALED = pytest.mark.parametrize("level", ["O1", "O2"])


def start(level: str, device: str = "cpu", **options: Any) -> tuple[nn.Module, Any]:
    """A weight [[2, 3]] and SGD that subtracts half of its gradient."""
    model = linear([[2.0, 3.0]], device)
    options = {"loss_scale": 8.0, "max_loss_scale": 8.0, "verbosity": 0, **options}
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.5), opt_level=level, **options)


def loss_of(model: nn.Module, factor: float = 1.0) -> Tensor:
    """Its gradient is [[4, 1]] times `factor`."""
    row = torch.tensor([[4.0, 1.0]], device=next(model.parameters()).device)
    return model(row).float().sum() * factor


def weight(optimizer: Any) -> list[list[float]]:
    return next(amp.master_params(optimizer)).tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Backward past the scaled loss


@SCALED
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("total", [lambda loss: loss, lambda loss: loss / 4 + 0 * loss.square(), torch.sum])
def test_backward_of_the_loss_in_the_body_is_an_error_that_gives_the_line(level, device, total):
    model, optimizer = start(level, device)
    with (
        pytest.raises(RuntimeError, match=r"8 times too small; write `with .*scaled_loss\.backward\(\)`"),
        amp.scale_loss(loss := loss_of(model), optimizer),
    ):
        total(loss).backward()
    assert all(p.grad is None for p in (*model.parameters(), *amp.master_params(optimizer)))
    backward(loss_of(model), optimizer)
    optimizer.step()
    assert weight(optimizer) == [[0.0, 2.5]]


@SCALED
def test_the_error_leaves_earlier_gradients_and_the_scale(level):
    model, optimizer = start(level, loss_scale="dynamic")
    backward(loss_of(model), optimizer)
    before = amp.state_dict(optimizer)
    with pytest.raises(RuntimeError, match="through the loss"), amp.scale_loss(loss := loss_of(model), optimizer):
        loss.backward()
    assert amp.state_dict(optimizer) == before
    assert next(amp.master_params(optimizer)).grad.tolist() == [[4.0, 1.0]]


@pytest.mark.parametrize(("level", "options"), [("O1", {"loss_scale": 1.0}), ("O4", {}), ("O5", {}), ("O0", {})])
def test_backward_of_the_loss_is_no_error_where_it_is_not_scaled(level, options):
    model, optimizer = start(level, **{"loss_scale": None, **options})
    with amp.scale_loss(loss := loss_of(model), optimizer):
        loss.backward()
    optimizer.step()
    assert weight(optimizer) == [[0.0, 2.5]]


def by_parts(loss: Tensor, scaled: Tensor, optimizer: Any) -> None:
    (scaled / 4).backward(retain_graph=True)
    torch.autograd.backward([scaled * 0.75])


def with_a_penalty(loss: Tensor, scaled: Tensor, optimizer: Any) -> None:
    torch.autograd.grad(loss, list(amp.master_params(optimizer)), create_graph=True, allow_unused=True)
    scaled.backward(create_graph=True)


def by_the_scale(loss: Tensor, scaled: Tensor, optimizer: Any) -> None:
    (loss * amp.loss_scale(optimizer)).backward()


@SCALED
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("body", [by_parts, with_a_penalty, by_the_scale])
def test_bodies_that_scale_each_gradient_train_unchanged(level, body):
    model, optimizer = start(level)
    with amp.scale_loss(loss := loss_of(model), optimizer) as scaled:
        body(loss, scaled, optimizer)
    assert not loss._backward_hooks and not scaled._backward_hooks
    optimizer.step()
    assert weight(optimizer) == [[0.0, 2.5]]


@SCALED
@pytest.mark.parametrize("of_one_operator", [False, True])
def test_backward_of_another_loss_in_the_body_warns(level, of_one_operator):
    model, optimizer = start(level)
    given, other = loss_of(model), loss_of(model)
    if of_one_operator:  # autograd calls the hooks of `given` with None
        given, other = torch.var_mean(given.expand(2), correction=0)
    with (
        pytest.warns(UserWarning, match="no backward pass went through the loss that it was given"),
        amp.scale_loss(given, optimizer),
    ):
        other.backward()


@SCALED
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", [True, False])
def test_backward_of_another_loss_beside_the_scaled_one_warns_in_the_first_body(level, device, first):
    model, optimizer = start(level, device)
    with (
        pytest.warns(UserWarning, match=r"went past the scaled loss.* give each a scale_loss of its own") as told,
        amp.scale_loss(loss_of(model), optimizer) as scaled,
    ):
        for loss in (loss_of(model), scaled) if first else (scaled, loss_of(model)):
            loss.backward()
    assert told[0].filename == __file__
    assert not model.weight._post_accumulate_grad_hooks


def checkpointed(model: nn.Module, scaled: Tensor) -> None:
    scaled.backward()


def several(model: nn.Module, scaled: Tensor) -> None:
    (scaled / 2).backward(retain_graph=True)
    torch.autograd.backward([scaled / 4, scaled / 4])


@SCALED
@pytest.mark.parametrize("body", [checkpointed, several])
def test_backward_passes_of_the_scaled_loss_alone_are_not_warned_of(level, body):
    """A reentrant checkpoint runs another backward pass inside the backward of the scaled loss."""
    model, optimizer = start(level)
    row = torch.tensor([[4.0, 1.0]], requires_grad=True)
    reentrant = body is checkpointed
    out = torch.utils.checkpoint.checkpoint(model, row, use_reentrant=True) if reentrant else model(row)
    with amp.scale_loss(out.float().sum(), optimizer) as scaled:
        body(model, scaled)
    optimizer.step()
    assert weight(optimizer) == [[0.0, 2.5]]


@SCALED
@pytest.mark.parametrize("device", DEVICES)
def test_backward_after_the_block_is_an_error(level, device):
    model, optimizer = start(level, device)
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        pass
    with pytest.raises(RuntimeError, match=r"call scaled_loss\.backward\(\) inside the block"):
        scaled.backward()
    assert model.weight.grad is None


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_a_context_that_was_not_entered_says_so(level):
    model, optimizer = start(level, loss_scale=None)
    with pytest.raises(AttributeError, match=r"no attribute 'backward'; write `with amp\.scale_loss"):
        amp.scale_loss(loss_of(model), optimizer).backward()


def test_a_step_with_gradients_of_no_scale_loss_warns_once():
    model, optimizer = start("O1")
    for catching in (pytest.warns(UserWarning, match="came through no scale_loss"), warnings.catch_warnings()):
        loss_of(model).backward()
        with catching:
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", [True, False])
def test_a_micro_batch_outside_of_scale_loss_is_warned_of_where_it_is_dropped(level, device, first):
    model, optimizer = start(level, device)
    if not first:
        backward(loss_of(model), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    loss_of(model).backward()
    with pytest.warns(UserWarning, match=r"weight has a gradient of .* dropped; .*call optimizer\.zero_grad"):
        backward(loss_of(model), optimizer)
    optimizer.zero_grad()
    backward(loss_of(model), optimizer)


# ---------------------------------------------------------------------------------------------------------------------
# The wrong object


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("device", DEVICES)
def test_the_optimizer_of_a_copy_made_before_is_warned_of_once(level, device):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).to(device)
    optimizer = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with pytest.warns(UserWarning, match=r"no parameter of SGD, whose step will change nothing") as told:
        backward(loss_of(model), optimizer)
    assert all(name in str(told[0].message) for name, _ in model.named_parameters())
    backward(loss_of(model), optimizer)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_model_in_place_of_its_optimizer_is_named(level):
    model, optimizer = start(level, loss_scale=None)
    with pytest.raises(TypeError, match="master_params: got a Linear for an optimizer; wanted the optimizer"):
        amp.master_params(model)
    for given in (model, [optimizer, model]):
        with pytest.raises(TypeError, match="scale_loss: got a Linear for an optimizer; wanted the optimizer"):
            amp.scale_loss(loss_of(model), given)


# ---------------------------------------------------------------------------------------------------------------------
# GradScalers


def scaled_by(scaler: Any, model: nn.Module, optimizer: Any, how: str) -> None:
    loss = loss_of(model)
    if how == "alone":
        scaler.scale(loss).backward()
    else:
        with amp.scale_loss(scaler.scale(loss) if how == "around" else loss, optimizer) as scaled:
            (scaler.scale(scaled) if how == "inside" else scaled).backward()
    scaler.step(optimizer)
    scaler.update()


@SCALED
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, amp.GradScaler])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ["around", "inside"])
def test_a_grad_scaler_and_scale_loss_are_an_error_that_names_both(level, kind, fused, how, monkeypatch):
    model = linear([[2.0, 3.0]])
    kwargs: dict[str, Any] = {"fused": True} if fused else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, **kwargs)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    monkeypatch.setattr(gc, "get_referrers", None)  # which walks over all objects
    with pytest.raises(RuntimeError) as told:
        scaled_by(kind("cpu", init_scale=4.0), model, optimizer, how)
    assert "GradScaler" in str(told.value) and "scale_loss" in str(told.value)
    assert weight(optimizer) == [[2.0, 3.0]]


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("unscale", [False, True])
def test_torchs_grad_scaler_over_masters_says_which_scaler_to_take(level, unscale):
    model, optimizer = start(level, loss_scale=None)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(model)).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"FP32 masters; use amp\.GradScaler\(\) in its place, or amp\.scale_loss"):
        scaler.step(optimizer)


@pytest.mark.parametrize(
    ("level", "how", "options"),
    [
        ("O1", "alone", {}),
        ("O0", "around", {}),
        ("O4", "around", {}),
        ("O5", "inside", {}),
        ("O1", "around", {"enabled": False}),
        ("O2", "inside", {"enabled": False}),
    ],
)
def test_a_grad_scaler_whose_scale_is_the_only_one_trains(level, how, options):
    model, optimizer = start(level, loss_scale=None)
    scaled_by(torch.amp.GradScaler("cpu", init_scale=4.0, **options), model, optimizer, how)
    assert weight(optimizer) == [[0.0, 2.5]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keeps_the_loss", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5", "O5+split"])
def test_a_plain_step_after_a_grad_scalers_backward_says_to_step_by_the_scaler(level, keeps_the_loss, device):
    model, optimizer = start(level, device, loss_scale=None)
    scaler = amp.GradScaler(device, init_scale=4.0)
    loss = loss_of(model)
    scaler.scale(loss).backward()
    if not keeps_the_loss:
        del loss
    with pytest.warns(UserWarning, match=r"write `scaler\.step\(optimizer\)` and `scaler\.update\(\)`") as told:
        optimizer.step()
    assert len(told) == 1 and told[0].filename == __file__


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("unscaled", [False, True])
def test_clipping_of_what_a_grad_scaler_has_scaled_says_to_unscale_first(level, unscaled):
    model, optimizer = start(level, loss_scale=None)
    scaler = amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(model)).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    with nullcontext() if unscaled else pytest.warns(UserWarning, match=r"scaler\.unscale_\(optimizer\)`.*that first"):
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    scaler.step(optimizer)
    assert weight(optimizer) == [[0.0, 2.5]]


# ---------------------------------------------------------------------------------------------------------------------
# Clipping


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_plain_step_with_gradients_that_a_grad_scaler_has_unscaled_trains(level):
    model, optimizer = start(level, loss_scale=None)
    scaler = amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "SGD.step: its gradients came through no scale_loss")
        optimizer.step()
    assert weight(optimizer) == [[0.0, 2.5]]


@SCALED
@pytest.mark.parametrize("of", ["model", "masters"])
@pytest.mark.parametrize("delayed", [False, True])
def test_clipping_of_gradients_that_are_still_scaled_warns(level, of, delayed):
    model, optimizer = start(level)
    params = model.parameters() if of == "model" else amp.master_params(optimizer)
    where = "after scale_loss(..., delay_unscale=True)" if delayed else "in the body of scale_loss"
    with pytest.warns(UserWarning) as told:
        with amp.scale_loss(loss_of(model), optimizer, delay_unscale=delayed) as scaled:
            scaled.backward()
            if not delayed:
                nn.utils.clip_grad_norm_(params, 1.0)
        if delayed:
            nn.utils.clip_grad_norm_(params, 1.0)
    assert all(f"clipping: called {where}" in str(each.message) for each in told)

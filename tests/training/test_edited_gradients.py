"""Gradients and weights that user code clips, edits or clears between backward and step."""

from __future__ import annotations

import math

import pytest
import torch
from crossed import crossed
from small_trainings import EVERY, master_grads, setup, sgd, x
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from training import backward, linear

from amp_patch import amp


@crossed(
    {"whose": ["masters", "model"]},
    pytest.mark.parametrize(
        "clip", [clip_grad_norm_, torch.nn.utils.clip_grad_norm_], ids=["imported early", "attribute"]
    ),
    {"level": EVERY},
)
def test_clipping_the_norm_acts_on_the_gradients_of_the_step(level, clip, whose):
    model, optimizer = setup(level)
    backward(model(x(3.0, 4.0)).sum(), optimizer)
    params = amp.master_params(optimizer) if whose == "masters" else model.parameters()
    assert clip(params, 1.0).item() == 5.0
    optimizer.step()
    assert model.weight[0].tolist() == pytest.approx([1 - 0.6, 2 - 0.8], abs=1e-2)


@pytest.mark.parametrize("level", EVERY)
def test_clipping_by_value_acts_on_the_gradients_of_the_step(level):
    model, optimizer = setup(level)
    backward(model(x(3.0, 0.25)).sum(), optimizer)
    clip_grad_value_(model.parameters(), 0.5)
    optimizer.step()
    assert model.weight.tolist() == [[0.5, 1.75]]


@pytest.mark.parametrize("edit", ["in place", "data", "copy"])
@pytest.mark.parametrize("level", EVERY)
def test_an_edited_weight_is_what_training_goes_on_from(level, edit):
    model, optimizer = setup(level, weight=((1.0, 2.0), (3.0, 4.0)))
    if edit == "in place":
        with torch.no_grad():
            model.weight.clamp_(-1.5, 1.5)
    elif edit == "data":
        model.weight.data.clamp_(-1.5, 1.5)  # WGAN's form, which no version counter tells
    else:
        model.weight.data.copy_(torch.tensor([[1.0, 1.5], [1.5, 1.5]]))
    backward(model(x(0.5, 0.25)).sum(), optimizer)
    optimizer.step()
    assert model.weight.tolist() == [[0.5, 1.25], [1.0, 1.25]]


@pytest.mark.parametrize("level", EVERY)
def test_a_gradient_that_exists_at_initialize_is_carried_over(level):
    model = linear([[1.0, 2.0]])
    model(x(0.5, 0.25)).sum().backward()
    model, optimizer = amp.initialize(model, sgd(model), opt_level=level, loss_scale=64.0)
    backward(model(x(0.5, 0.25)).sum(), optimizer)
    assert master_grads(optimizer) == [[[1.0, 0.5]]]


@pytest.mark.parametrize("level", EVERY)
def test_gradients_edited_through_master_params_are_honoured(level):
    model, optimizer = setup(level)
    backward(model(x(0.5, 1.0)).sum(), optimizer)
    for master in amp.master_params(optimizer):
        master.grad.mul_(2)
    optimizer.step()
    assert model.weight.tolist() == [[0.0, 0.0]]


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


@pytest.mark.parametrize("level", EVERY)
def test_a_parameter_without_gradient_and_a_step_without_any_are_legal(level):
    model = nn.ModuleDict({"used": linear([[1.0]]), "unused": linear([[1.0]])})
    used = model["used"]
    _, optimizer = amp.initialize([used, model["unused"]], sgd(model), opt_level=level, loss_scale=64.0)
    optimizer.zero_grad()
    optimizer.step()
    backward(used(x(1.0)).sum(), optimizer)
    optimizer.step()
    assert (used.weight.item(), model["unused"].weight.item()) == (0.0, 1.0)


def normed(level="O2", seed=0, **kwargs):
    """Half layers around a batch norm that is kept, which is its own master, and has gradients of its own."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    return amp.initialize(model, sgd(model), opt_level=level, **kwargs)


FOUR = torch.tensor([[1.0, 2.0], [0.5, -1.0], [2.0, 0.0], [-1.0, 1.0]])


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("kept", [True, False])
def test_a_backward_outside_of_scale_loss_is_warned_about(level, kept):
    model, optimizer = normed(level, keep_batchnorm_fp32=kept)
    model(FOUR).sum().backward()
    more = 3 if kept else 5
    with pytest.warns(UserWarning, match=rf"SGD\.step: 0\.weight has a gradient .* never gathered .* {more} more"):
        optimizer.step()


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

"""Trainable parameters that no optimizer holds: backward passes reach them, and no step ever clears them."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from conftest import DEVICES
from crossed import crossed
from torch import nn
from training import linear, skipped

from amp_patch import amp


@crossed({"sparse": [False, True], "earlier": [False, True], "bad": [math.inf, math.nan], "level": ["O1", "O2"]})
@pytest.mark.parametrize("device", DEVICES)
def test_an_overflow_is_not_in_the_norm_of_later_steps(level, bad, earlier, sparse, device):
    """`clip_grad_norm_(model.parameters())` takes their gradients too, and would multiply all others by NaN."""
    table = nn.Embedding(2, 1, sparse=sparse, device=device)
    nn.init.ones_(table.weight)
    model = nn.ModuleDict({"trained": linear([[1.0]], device), "table": table})
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.trained.parameters(), lr=0.25), opt_level=level, loss_scale=4.0, verbosity=0
    )
    index = torch.tensor([1], device=device)

    def backward(factor: float) -> None:
        with amp.scale_loss((model.trained(table(index)) * factor).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()

    if earlier:
        backward(1.0)
        optimizer.step()
    weight = model.trained.weight.item()
    backward(bad)
    optimizer.step()
    assert skipped(optimizer) and model.trained.weight.item() == weight
    optimizer.zero_grad()
    backward(1.0)
    assert table.weight.grad.to_dense().tolist() == [[0.0], [weight]]
    if not sparse:  # torch takes no norm of sparse ones
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        assert norm.item() == pytest.approx(math.hypot(1.0, weight), rel=1e-3)
    optimizer.step()
    assert model.trained.weight.item() == weight - 0.25


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("skip", ["step", "continue"])
@pytest.mark.parametrize("device", DEVICES)
def test_clipping_by_the_norm_of_an_overflow_leaves_no_nan_for_later_steps(level, skip, device):
    """The overflow is another parameter's: `clip_grad_norm_` multiplies the gradients of all by NaN."""
    trained, unowned = linear([[1.0]], device), linear([[3.0]], device)
    model = nn.ModuleList([trained, unowned])
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(trained.parameters(), lr=0.25), opt_level=level, loss_scale=4.0, verbosity=0
    )
    one = torch.ones(1, 1, device=device)

    def backward(factor: float) -> float:
        optimizer.zero_grad()
        of_trained, of_unowned = (layer(one.to(layer.weight.dtype)).float().sum() for layer in model)
        with amp.scale_loss(of_trained * factor + of_unowned, optimizer) as scaled_loss:
            scaled_loss.backward()
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0).item()

    assert math.isnan(backward(math.nan))
    assert trained.weight.grad.isnan().all() and unowned.weight.grad.isnan().all()
    if skip == "step":
        optimizer.step()
        assert skipped(optimizer)
    assert backward(1.0) == pytest.approx(math.sqrt(2.0))
    assert unowned.weight.grad.item() == 1.0
    optimizer.step()
    assert trained.weight.item() == 0.75


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_parameter_that_is_thawed_in_no_optimizer_is_warned_of_once_and_its_gradient_is_unscaled(level, device):
    frozen, trained = linear([[2.0]], device).requires_grad_(False), linear([[3.0]], device)
    model = nn.Sequential(frozen, trained)
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(trained.parameters(), lr=0.0), opt_level=level, loss_scale=4.0, verbosity=0
    )

    def norm() -> float:
        model.zero_grad()
        with amp.scale_loss(model(torch.ones(1, 1, device=device)).sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0).item()

    assert norm() == 2.0
    optimizer.step()
    frozen.requires_grad_(True)
    assert norm() == pytest.approx(math.hypot(2.0, 3.0), rel=1e-3)
    with pytest.warns(UserWarning, match=r"'0\.weight' was frozen at .* call optimizer\.add_param_group"):
        optimizer.step()
    assert norm() == pytest.approx(math.hypot(2.0, 3.0), rel=1e-3)
    optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("how", ["added", "another training", "no gradient"])
def test_a_thawed_parameter_that_an_optimizer_gets_is_not_warned_of(level, how):
    frozen, trained = linear([[2.0]]).requires_grad_(False), linear([[3.0]])
    model = nn.Sequential(frozen, trained)
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(trained.parameters(), lr=0.25), opt_level=level, loss_scale=4.0, verbosity=0
    )
    frozen.requires_grad_(True)
    optimizers = [optimizer]
    if how == "added":
        optimizer.add_param_group({"params": [frozen.weight]})
    elif how == "another training":
        other = torch.optim.SGD(frozen.parameters(), lr=0.25)
        optimizers.append(amp.initialize(model, other, opt_level=level, loss_scale=4.0, verbosity=0)[1])
    x = torch.ones(1, 1)
    out = trained(x.to(trained.weight.dtype)).float() if how == "no gradient" else model(x)
    with amp.scale_loss(out.sum(), optimizers) as scaled_loss:
        scaled_loss.backward()
    for each in optimizers:
        each.step()
    assert [p.item() for each in optimizers for p in amp.master_params(each)] == {
        "added": [2.5, 1.25],
        "another training": [2.5, 1.25],
        "no gradient": [2.75],
    }[how]


def test_a_frozen_module_is_freed_while_its_optimizer_is_there():
    model = nn.Sequential(linear([[2.0]]).requires_grad_(False), linear([[3.0]]))
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model[1].parameters(), lr=0.25), opt_level="O1", verbosity=0
    )
    weight = weakref.ref(model[0].weight)
    del model[0]
    gc.collect()
    assert weight() is None and optimizer is not None

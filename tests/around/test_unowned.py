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


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("device", DEVICES)
def test_the_gradient_of_a_parameter_that_is_thawed_in_no_optimizer_is_unscaled(level, device):
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
    optimizer.step()
    assert norm() == pytest.approx(math.hypot(2.0, 3.0), rel=1e-3)


def test_a_frozen_module_is_freed_while_its_optimizer_is_there():
    model = nn.Sequential(linear([[2.0]]).requires_grad_(False), linear([[3.0]]))
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model[1].parameters(), lr=0.25), opt_level="O1", verbosity=0
    )
    weight = weakref.ref(model[0].weight)
    del model[0]
    gc.collect()
    assert weight() is None and optimizer is not None

"""Cast weights that are frozen when an optimizer gets them, and unfrozen later."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import DEVICES
from torch import Tensor, nn
from training import linear

from amp_patch import amp
from amp_patch.masters.masters import master_of

with_masters = pytest.mark.parametrize(
    "options",
    [{"opt_level": "O2"}, {"opt_level": "O5"}, {"opt_level": "O5", "master_weights": "split"}],
    ids=["O2", "O5", "split"],
)


def frozen_then_added(options: dict[str, Any], device: torch.device) -> tuple[nn.Sequential, torch.optim.SGD]:
    """Return a model of two layers, and its optimizer, which got the first layer while that was frozen."""
    model = nn.Sequential(linear([[2.0]], device), linear([[3.0]], device))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.25)
    model, optimizer = amp.initialize(model, optimizer, loss_scale=4.0, verbosity=0, **options)
    model[0].requires_grad_(False)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 2.0**-10})
    assert master_of(model[0].weight) is None  # no step changes it, so that it needs no FP32 value
    return model, optimizer


def loss_of(model: nn.Module, device: torch.device) -> Tensor:
    return model(torch.ones(1, 1, device=device)).sum()


def train(model: nn.Module, optimizer: Any, device: torch.device) -> None:
    with amp.scale_loss(loss_of(model, device), optimizer) as scaled_loss:
        scaled_loss.backward()


@with_masters
@pytest.mark.parametrize("device", DEVICES)
def test_a_weight_that_was_added_frozen_gets_its_master_at_the_first_backward_after_it_is_unfrozen(options, device):
    model, optimizer = frozen_then_added(options, device)
    train(model, optimizer, device)
    model[0].requires_grad_(True)
    optimizer.step()  # of the backward before: only the second layer has a gradient
    assert [weight.item() for weight in amp.master_params(optimizer)] == [2.5, 2.0]
    optimizer.zero_grad()
    train(model, optimizer, device)
    optimizer.step()
    # 2 - 2.5 / 1024 lies between two numbers of BF16, and of FP16.
    assert [weight.item() for weight in amp.master_params(optimizer)] == [2.0, 2.0 - 2.5 / 1024]


@with_masters
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_would_train_such_a_weight_without_a_master_is_refused(options, copied, device):
    model, optimizer = frozen_then_added(options, device)
    if copied:
        model, optimizer = copy.deepcopy((model, optimizer))
    model[0].requires_grad_(True)
    loss_of(model, device).backward()
    with pytest.raises(RuntimeError, match=r"came frozen .* call scale_loss for its loss") as refusal:
        optimizer.step()
    assert copied or "'0.weight'" in str(refusal.value)  # a copy does not know the names
    assert model[0].weight.item() == 2.0
    optimizer.zero_grad()
    train(model, optimizer, device)
    optimizer.step()
    assert [weight.item() for weight in amp.master_params(optimizer)] == [2.5, 2.0 - 3.0 / 1024]


@with_masters
@pytest.mark.parametrize("device", DEVICES)
def test_a_frozen_weight_with_a_gradient_is_added_with_a_master(options, device):
    """A step uses the gradient, as in torch."""
    model = nn.Sequential(linear([[2.0]], device), linear([[3.0]], device))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.25)
    model, optimizer = amp.initialize(model, optimizer, loss_scale=1.0, verbosity=0, **options)
    train(model, optimizer, device)
    model[0].requires_grad_(False)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 2.0**-10})
    optimizer.step()
    assert [weight.item() for weight in amp.master_params(optimizer)] == [2.5, 2.0 - 3.0 / 1024]

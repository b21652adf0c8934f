"""Masters keep what the weights round away."""

from __future__ import annotations

import pytest
import torch
from conftest import DEVICES
from training import backward, linear

from amp_patch import amp


class OwnSGD(torch.optim.SGD):
    """A class of user code, which does not step in one pass."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [torch.optim.SGD, OwnSGD])
@pytest.mark.parametrize(("level", "unit"), [("O2", 2.0**-10), ("O3", 2.0**-10), ("O5", 2.0**-7)])
def test_masters_keep_updates_that_the_weights_round_away(level, unit, make, device):
    """Each update is a quarter of the distance from 1 to the next smaller weight, so a weight alone stays 1."""
    model = linear([[1.0]], device)
    model, optimizer = amp.initialize(
        model, make(model.parameters(), lr=1.0), opt_level=level, loss_scale=128.0, verbosity=0
    )
    for _ in range(8):
        optimizer.zero_grad()
        backward(model(torch.full((1, 1), unit / 8, device=device)).float().sum(), optimizer)
        optimizer.step()
    assert model.weight.item() == (1.0 if level == "O3" else 1.0 - unit)

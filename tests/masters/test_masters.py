"""The links of masters and parameters, which depend on the identity of the parameter alone."""

from __future__ import annotations

import gc

import pytest
import torch
from conftest import DEVICES
from torch import nn
from training import backward, linear

from amp_patch import amp
from amp_patch.masters.masters import _links, connect, disconnect, link_of, links_of, master_of


def parameter():
    return nn.Parameter(torch.ones(2, dtype=torch.bfloat16))


def test_a_master_is_found_by_the_identity_of_its_parameter():
    param, equal, master = parameter(), parameter(), torch.ones(2)
    link = connect(param, master)
    assert link_of(param) is link and master_of(param) is master
    assert link_of(equal) is None and master_of(equal) is None
    assert connect(param, master) is link
    assert list(links_of([equal, param])) == [(param, link)]
    disconnect(param)
    disconnect(equal)
    assert link_of(param) is None


def test_another_master_takes_the_place_of_the_first():
    param, master = parameter(), torch.ones(2)
    first = connect(param, torch.ones(2))
    second = connect(param, master)
    assert second is not first and master_of(param) is master


def test_a_parameter_that_dies_takes_its_link_along_and_no_other():
    gc.collect()
    before = len(_links)
    params = [parameter() for _ in range(100)]
    for param in params:
        connect(param, torch.ones(2))
        disconnect(param)
        connect(param, torch.ones(2))
    kept = params[50]
    del params, param
    assert len(_links) == before + 1 and link_of(kept) is not None
    fresh = [parameter() for _ in range(100)]  # some of them at the addresses of those that died
    assert all(link_of(param) is None for param in fresh)


def test_a_parameter_that_dies_in_a_cycle_takes_its_link_along():
    gc.collect()
    before = len(_links)
    for _ in range(10):
        param = parameter()
        param.itself = param
        connect(param, torch.ones(2))
    del param
    gc.collect()
    assert len(_links) == before


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

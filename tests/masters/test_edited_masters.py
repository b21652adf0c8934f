"""Edits of masters between steps, by any code and in any form: the next forward uses the new values.

Schedule-free optimizers write in `eval()` and `train()`, Lookahead after a step, SAM before one, scripts whenever they
like. Weights are small multiples of 1/8, which both low-precision types hold.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from conftest import DEVICES
from small_trainings import LEVELS_WITH_MASTERS, output, start_scalar
from torch import nn
from training import LEVELS, backward, linear

from amp_patch import amp
from amp_patch.masters.master import Master


def add(p):
    p.add_(1.0)


def copy_into(p):
    p.copy_(torch.full_like(p, 2.0))


def data_copy(p):
    p.data.copy_(torch.full_like(p, 2.0))


def data_add(p):
    p.data.add_(1.0)


def data_assigned(p):
    p.data = torch.full_like(p, 2.0)


def data_assigned_where_it_was(p):
    """The edit is made twice, because the second may reuse the memory of the first."""
    p.data = torch.full_like(p, 3.0)
    p.data = torch.full_like(p, 2.0)


def foreach(p):
    torch._foreach_add_([p], 1.0)


EDITS = (add, copy_into, data_copy, data_add, data_assigned, data_assigned_where_it_was, foreach)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("edit", EDITS)
def test_a_forward_sees_writes_into_the_optimizer_s_parameters(edit, level, device):
    model, optimizer = start_scalar(level, device=device)
    assert output(model) == 1.0
    with torch.no_grad():
        for p in amp.master_params(optimizer):
            edit(p)
    assert output(model) == 2.0
    # The step neither takes it back nor makes it twice.
    backward(model(torch.full((1, 1), 0.5, device=device)).sum(), optimizer)
    optimizer.step()
    assert output(model) == 1.5
    assert next(amp.master_params(optimizer)).item() == 1.5


class Own(torch.optim.SGD):
    """An optimizer that a script defines, which steps neither in one pass nor in portions."""


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, Own])
@pytest.mark.parametrize("level", LEVELS_WITH_MASTERS)
@pytest.mark.parametrize("edit", EDITS)
def test_a_step_without_a_forward_before_it_keeps_the_edit(edit, level, optimizer):
    model, optimizer = start_scalar(level, optimizer=optimizer)
    backward(model(torch.full((1, 1), 0.5)).sum(), optimizer)
    with torch.no_grad():
        edit(next(amp.master_params(optimizer)))
    optimizer.step()
    assert output(model) == 1.5


@pytest.mark.parametrize("level", LEVELS_WITH_MASTERS)
def test_edits_of_weights_and_edits_of_other_masters_both_count(level):
    model = nn.Sequential(linear([[1.0]]), linear([[1.0]]))
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), opt_level=level)
    model[0].weight.data.fill_(0.5)  # a clamp, as of a WGAN
    _, second = amp.master_params(optimizer)
    second.data.fill_(4.0)
    with torch.no_grad():
        assert model(torch.ones(1, 1)).item() == 2.0
    optimizer.step()
    assert [p.item() for p in amp.master_params(optimizer)] == [0.5, 4.0]


def test_without_edits_nothing_is_written():
    model, optimizer = start_scalar()
    output(model)
    version = model.weight._version
    for _ in range(3):
        output(model)
        next(amp.master_params(optimizer)).data.norm()  # a look is no edit
    assert model.weight._version == version


def test_torch_chooses_the_foreach_form_for_masters_as_for_parameters(monkeypatch):
    module = importlib.import_module("torch.optim.optimizer")
    monkeypatch.setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    before = module._foreach_supported_types
    _, optimizer = start_scalar()
    masters = list(amp.master_params(optimizer))
    assert isinstance(masters[0], Master)
    assert module._default_to_fused_or_foreach(masters, False) == (False, True)
    amp.restore()
    assert module._foreach_supported_types is before
    assert type(masters[0]) is nn.Parameter  # whoever kept one has what a script without amp_patch has


def test_a_torch_that_keeps_no_such_list_gets_plain_masters(monkeypatch):
    monkeypatch.delattr(importlib.import_module("torch.optim.optimizer"), "_foreach_supported_types")
    model, optimizer = start_scalar(optimizer=lambda params, lr: torch.optim.SGD(params, lr=lr, foreach=False))
    master = next(amp.master_params(optimizer))
    assert type(master) is nn.Parameter
    with torch.no_grad():
        master.add_(1.0)
    assert output(model) == 2.0

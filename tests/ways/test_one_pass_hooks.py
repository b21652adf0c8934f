"""Steps in one pass with users' hooks and replaced methods."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
from small_trainings import backward_row
from torch import nn
from training import linear

from amp_patch import amp

pytestmark = pytest.mark.extension
MAKES = pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad], ids=["one pass", "portions"])


def start_hooked(make=torch.optim.SGD, before=None, level="O5"):
    model = linear([[1.0, 2.0]])
    optimizer = make(model.parameters(), lr=0.5)
    if before is not None:
        optimizer.register_step_post_hook(before)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0)


backward_four = partial(backward_row, gradient=(4.0, -4.0))


@MAKES
def test_a_closure_that_a_hook_brings_is_called(make):
    model, optimizer = start_hooked(make)
    calls = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: ((*args, lambda: calls.append(1) or 7.0), kwargs))
    backward_four(model, optimizer)
    assert optimizer.step() == 7.0 and calls == [1]
    assert torch.equal(model.weight, optimizer.param_groups[0]["params"][0].bfloat16())


@pytest.mark.parametrize("when", ["before", "after"])
@MAKES
def test_a_step_that_replaces_torchs_is_called(make, when, monkeypatch):
    calls = []

    def replace():
        original = make.step
        monkeypatch.setattr(make, "step", lambda self, closure=None: (calls.append(1), original(self, closure))[1])

    made = make([nn.Parameter(torch.ones(1))], lr=0.5)  # torch gives the class its hooks with the first optimizer
    if when == "before":
        replace()
    model, optimizer = start_hooked(make)
    if when == "after":
        replace()
    backward_four(model, optimizer)
    optimizer.step()
    assert calls == [1] and made is not None
    step = 2.0 if make is torch.optim.SGD else 0.5
    assert model.weight.tolist() == [[1 - step, 2 + step]]


def test_torch_is_asked_whether_a_graph_is_captured(monkeypatch):
    model, optimizer = start_hooked(torch.optim.AdamW)
    names = [name for name in dir(optimizer) if name.endswith("graph_capture_health_check")]

    def refuse():
        raise RuntimeError("while capturing")

    for name in names:
        monkeypatch.setattr(optimizer, name, refuse)
    backward_four(model, optimizer)
    with pytest.raises(RuntimeError, match="while capturing"):
        optimizer.step()
    assert names and model.weight.tolist() == [[1, 2]]


def test_torch_2_6_tells_adamw_the_groups_amsgrad(monkeypatch):
    original = torch.optim.AdamW._init_group

    def of_2_6(self, group, params_with_grad, grads, amsgrad, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps):
        lists = (params_with_grad, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps)
        return original(self, {**group, "amsgrad": bool(amsgrad)}, *lists)

    if "amsgrad" not in inspect.signature(original).parameters:  # where it is not 2.6
        monkeypatch.setattr(torch.optim.AdamW, "_init_group", of_2_6)
    model, optimizer = start_hooked(lambda params, lr: torch.optim.AdamW(params, lr=lr, amsgrad=True))
    backward_four(model, optimizer)
    optimizer.step()
    (state,) = optimizer.state.values()
    assert {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"} == state.keys() and state["step"] == 1

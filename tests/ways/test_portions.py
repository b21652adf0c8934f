"""Steps in portions: which optimizers take them, and what others see of it.

tests/optimizers/test_every_optimizer.py has the numbers.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from any_optimizer import Each
from torch import Tensor, nn
from torch_optimizers import AVAILABLE, OPTIMIZERS, recipe
from training import backward

from amp_patch import amp
from amp_patch.masters.masters import has_gradient
from amp_patch.support import generated_class
from amp_patch.ways import portions

pytestmark = pytest.mark.extension

# Not those that step in one pass, and not SparseAdam, which takes sparse gradients alone.
IN_PORTIONS = [name for name in AVAILABLE if name not in ("Adam", "AdamW", "SGD", "SparseAdam")]
MAKERS = {name: recipe(name, lr=OPTIMIZERS[name]["lr"] / 2) for name in IN_PORTIONS}


@pytest.fixture(autouse=True)
def small_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make portions of one or two parameters, and forget the messages that other tests have logged."""
    monkeypatch.setattr(portions, "PORTION", 24)
    monkeypatch.setattr(portions, "_said", set())
    monkeypatch.setattr(generated_class, "_classes", WeakValueDictionary())


@pytest.fixture
def how_many(monkeypatch) -> list[int]:
    """Of each step that goes in portions the number of these."""
    counts: list[int] = []
    real = portions._step_each

    def step_each(step: Any, chosen: Any, plain: Any) -> None:
        counts.append(len(chosen))
        real(step, chosen, plain)

    monkeypatch.setattr(portions, "_step_each", step_each)
    return counts


class PortionsNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(5, 7), nn.LayerNorm(7)
        self.second, self.late = nn.Linear(7, 3, bias=False), nn.Linear(7, 3, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs)).relu()
        return self.second(hidden) + self.late(hidden)


def training(make: Callable[[Any], Any]) -> tuple[PortionsNet, Any]:
    model = PortionsNet()
    params = [*model.first.parameters(), *model.norm.parameters(), *model.second.parameters()]
    if make is MAKERS.get("Muon"):
        params = [param for param in params if param.dim() == 2]
    optimizer = make([{"params": params[:2]}, {"params": params[2:]}] if len(params) > 2 else params)
    return amp.initialize(model, optimizer, opt_level="O5", keep_fp32=nn.LayerNorm, verbosity=0)


@pytest.mark.parametrize("name", IN_PORTIONS)
def test_torchs_classes_step_in_portions_and_so_do_copies(name, how_many):
    model, optimizer = training(MAKERS[name])
    for each in ((model, optimizer), copy.deepcopy((model, optimizer))):
        backward_batch(*each, 0)
        each[1].step()
    assert len(how_many) == 2 and min(how_many) >= (1 if name == "Muon" else 3)


def backward_batch(model: PortionsNet, optimizer: Any, step: int, factor: float = 1.0) -> None:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
    backward(model(inputs).float().square().mean() * factor, optimizer)


# ----------------------------------------------------------------------------------------------------------------------
# What takes the ordinary way


ORDINARY = {
    "not one of torch.optim": lambda params: type("Own", (torch.optim.NAdam,), {})(params),
    "a setting is a tensor": lambda params: torch.optim.RMSprop(params, lr=torch.tensor(0.1)),
    "fused=True": lambda params: torch.optim.Adagrad(params, fused=True),
    "differentiable=True": lambda params: torch.optim.NAdam(params, differentiable=True),
}


@pytest.mark.parametrize("reason", ORDINARY)
def test_settings_and_classes_that_take_the_ordinary_way(reason, how_many, caplog):
    with caplog.at_level(logging.INFO, "amp_patch"):
        model, optimizer = training(ORDINARY[reason])
    assert reason in caplog.text
    if reason != "differentiable=True":  # torch's step writes into leaves then
        backward_batch(model, optimizer, 0)
        optimizer.step()
    assert how_many == []


def test_settings_and_closures_that_come_later(how_many, caplog):
    model, optimizer = training(torch.optim.Adagrad)
    for step, fused in enumerate([None, True, None]):
        for group in optimizer.param_groups:
            group["fused"] = fused
        backward_batch(model, optimizer, step)
        with caplog.at_level(logging.INFO, "amp_patch"):
            optimizer.step()
    with caplog.at_level(logging.INFO, "amp_patch"):
        assert optimizer.step(lambda: 7.0) == 7.0
    assert len(how_many) == 2 and "fused=True" in caplog.text and "closure" in caplog.text


@pytest.mark.parametrize("frozen", [False, True])
def test_an_edit_of_a_weight_that_is_not_stepped_is_adopted(frozen, how_many):
    model, optimizer = training(torch.optim.NAdam)
    model.first.weight.requires_grad_(not frozen)
    backward_batch(model, optimizer, 0)
    if not frozen:
        next(iter(amp.master_params(optimizer))).grad = None
    model.first.weight.data.fill_(0.5)
    optimizer.step()
    assert how_many == [3]
    assert (next(iter(amp.master_params(optimizer))) == 0.5).all() and (model.first.weight == 0.5).all()


class Around:
    """A wrapper that may read gradients after the step, as Lookahead does."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


class TwoPasses(Around):
    """A wrapper that moves weights between two backward passes, as SAM does."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.base_optimizer = optimizer


@pytest.mark.parametrize("kind", [Around, TwoPasses])
def test_wrappers_that_read_gradients_prevent_portions(kind, how_many):
    model, wrapper = training(lambda params: kind(torch.optim.NAdam(params)))
    backward_batch(model, wrapper, 0)
    wrapper.step()
    assert how_many == []


def test_two_optimizers_of_one_parameter_step_as_a_whole(how_many):
    model = PortionsNet()
    optimizers = [torch.optim.NAdam(model.parameters()), torch.optim.RMSprop(model.second.parameters())]
    model, optimizers = amp.initialize(model, optimizers, opt_level="O5", verbosity=0)
    backward(model(torch.ones(4, 5)).float().square().mean(), optimizers)
    for optimizer in optimizers:
        optimizer.step()
    assert how_many == []


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own
def test_a_sparse_gradient_is_stepped_with_the_others(how_many):
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 4))
    _, optimizer = amp.initialize(model, torch.optim.Adagrad(model.parameters()), opt_level="O5", verbosity=0)
    before = [master.detach().clone() for master in amp.master_params(optimizer)]
    backward(model(torch.tensor([1, 2])).float().square().mean(), optimizer)
    optimizer.step()
    assert how_many == []
    for param, master, old in zip(model.parameters(), amp.master_params(optimizer), before, strict=True):
        assert not torch.equal(master, old) and torch.equal(param, master.bfloat16())


# ----------------------------------------------------------------------------------------------------------------------
# What others see of it


@pytest.mark.usefixtures("registrations")
def test_a_gradient_that_the_optimizer_keeps_is_not_written_over(how_many):
    class Keeps(Each):
        def direction(self, group: Any, param: Tensor) -> Tensor:
            self.state[param]["last"] = param.grad
            return param.grad

    amp.register_per_parameter_optimizer(Keeps)
    model, optimizer = training(Keeps)
    for step in range(3):
        backward_batch(model, optimizer, step)
        before = [master.detach().clone() for master in amp.master_params(optimizer)]
        optimizer.step()
        for master, value in zip(amp.master_params(optimizer), before, strict=True):
            assert torch.equal(master.detach(), value.add(optimizer.state[master]["last"], alpha=-0.1))
    assert how_many == [4] * 3


@pytest.mark.parametrize("next_step", ["step", "training"])
def test_an_exception_in_a_portion(next_step, how_many):
    """Stepped parameters are published and not stepped again, the other gradients are cleared, and groups are whole."""
    model, optimizer = training(torch.optim.RMSprop)
    backward_batch(model, optimizer, 0)
    optimizer.step()
    of_norm = set(map(id, model.norm.parameters()))  # FP32, without masters
    masters = [master for master in amp.master_params(optimizer) if id(master) not in of_norm]
    broken = optimizer.state[masters[-1]].pop("square_avg")
    groups = [list(group["params"]) for group in optimizer.param_groups]
    before = [master.detach().clone() for master in masters]
    backward_batch(model, optimizer, 1)
    with pytest.raises(KeyError, match="square_avg"):
        optimizer.step()
    optimizer.state[masters[-1]]["square_avg"] = broken
    assert all(
        one is other
        for group, params in zip(optimizer.param_groups, groups, strict=True)
        for one, other in zip(group["params"], params, strict=True)
    )
    left = [master.detach().clone() for master in masters]
    changed = [not torch.equal(one, other) for one, other in zip(left, before, strict=True)]
    assert changed[0] and not changed[-1] and how_many[-1] == 4
    if next_step == "step":
        optimizer.step()  # there is no gradient any more
        assert all(torch.equal(master, value) for master, value in zip(masters, left, strict=True))
    else:
        backward_batch(model, optimizer, 2)
        optimizer.step()
        assert not any(torch.equal(master, value) for master, value in zip(masters, left, strict=True))
    assert torch.equal(model.first.weight, masters[0].bfloat16())
    assert not any(map(has_gradient, masters))

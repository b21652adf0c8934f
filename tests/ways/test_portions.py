"""Steps in portions: to the bit those of the whole list, for every optimizer of torch's; the ordinary way elsewhere."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from conftest import DEVICES
from crossed import crossed
from in_portions import Each
from torch import Tensor, nn
from torch_optimizers import AVAILABLE, OPTIMIZERS, recipe
from training import backward

from amp_patch import amp
from amp_patch.masters.masters import has_gradient
from amp_patch.support import generated_class
from amp_patch.ways import partial_step, portions

pytestmark = pytest.mark.skipif(not portions.can_wait(), reason="gradients wait where the extension is built")

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


def all_at_once(monkeypatch: Any) -> None:
    """The ordinary way for all that comes."""
    monkeypatch.setattr(portions.InPortions, "knows", lambda self, optimizer, stash: False)


class PortionsNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(5, 7), nn.LayerNorm(7)
        self.second, self.late = nn.Linear(7, 3, bias=False), nn.Linear(7, 3, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs)).relu()
        return self.second(hidden) + self.late(hidden)


def training(make: Callable[[Any], Any], level: str, **options: Any) -> tuple[PortionsNet, Any]:
    model = PortionsNet()
    params = [*model.first.parameters(), *model.norm.parameters(), *model.second.parameters()]
    if make is MAKERS.get("Muon"):
        params = [param for param in params if param.dim() == 2]
    optimizer = make([{"params": params[:2]}, {"params": params[2:]}] if len(params) > 2 else params)
    if level == "O2":
        options = {"loss_scale": "dynamic", "cpu_half": "native", **options}
    return amp.initialize(model, optimizer, opt_level=level, keep_fp32=nn.LayerNorm, verbosity=0, **options)


def backward_batch(model: PortionsNet, optimizer: Any, step: int, factor: float = 1.0) -> None:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
    backward(model(inputs).float().square().mean() * factor, optimizer)


def numbers(model: PortionsNet, optimizer: Any) -> list[Any]:
    """Weights, masters and state."""
    masters = list(amp.master_params(optimizer))
    return copy.deepcopy([*model.parameters(), *masters, *(dict(optimizer.state[master]) for master in masters)])


def adagrad_takes_groups() -> bool:
    """Tell whether torch's Adagrad can step parameters that are added later; in torch 2.6 it raises a KeyError."""
    weights = torch.ones(2).split(1)
    optimizer = torch.optim.Adagrad(weights[:1])
    optimizer.add_param_group({"params": weights[1:]})
    weights[1].grad = torch.ones(1)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


def fifty_steps(make: Callable[[Any], Any], level: str) -> list[Any]:
    """Train with all events that may happen in a training; return the numbers after every step."""
    model, optimizer = training(make, level)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    history = []
    for step in range(50):
        model.first.weight.requires_grad_(not 20 <= step < 25)
        if step == 15 and (type(optimizer).__name__ != "Adagrad" or adagrad_takes_groups()):
            optimizer.add_param_group({"params": list(model.late.parameters()), "lr": 0.01})
        backward_batch(model, optimizer, step, float("inf") if step in (3, 30) and level == "O2" else 1.0)
        if step % 5 == 1:
            backward_batch(model, optimizer, 100 + step)
        if step % 3 == 1:
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
        with torch.no_grad():
            if step == 35:
                model.second.weight.data.clamp_(-0.1, 0.1)
            if step == 40:
                next(iter(amp.master_params(optimizer))).mul_(0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        history.append(numbers(model, optimizer))
    return history


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@crossed(
    {
        "name": IN_PORTIONS,
        "level, foreach": [
            ("O2", None),
            ("O5", True),
            *(pytest.param(*pair, marks=pytest.mark.slow) for pair in [("O2", True), ("O5", None)]),
        ],
    },
    meet=1,
)
def test_portions_give_the_numbers_of_the_whole(name, level, foreach, how_many, monkeypatch):
    def make(params: Any) -> Any:
        optimizer = MAKERS[name](params)
        for group in optimizer.param_groups if foreach else ():
            group["foreach"] = foreach
        return optimizer

    portioned = fifty_steps(MAKERS[name] if name == "Muon" else make, level)
    assert len(how_many) >= 48 - 2 * (level == "O2") and min(how_many) >= (1 if name == "Muon" else 3)
    all_at_once(monkeypatch)
    how_many.clear()
    whole = fifty_steps(MAKERS[name] if name == "Muon" else make, level)
    assert how_many == []
    for step, (one, other) in enumerate(zip(portioned, whole, strict=True)):
        assert partial_step.same(one, other), step


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
        model, optimizer = training(ORDINARY[reason], "O5")
    assert reason in caplog.text
    assert optimizer._amp_stash.masters.waiting is None
    if reason != "differentiable=True":  # torch's step writes into leaves then
        backward_batch(model, optimizer, 0)
        optimizer.step()
    assert how_many == []


def test_a_closure_takes_the_ordinary_way(how_many, caplog):
    model, optimizer = training(torch.optim.NAdam, "O5")
    backward_batch(model, optimizer, 0)
    with caplog.at_level(logging.INFO, "amp_patch"):
        assert optimizer.step(lambda: 7.0) == 7.0
    assert "closure" in caplog.text and how_many == []


def test_settings_that_change_later(how_many, caplog):
    model, optimizer = training(torch.optim.Adagrad, "O5")
    for step, fused in enumerate([None, True, None]):
        for group in optimizer.param_groups:
            group["fused"] = fused
        backward_batch(model, optimizer, step)
        with caplog.at_level(logging.INFO, "amp_patch"):
            optimizer.step()
    assert len(how_many) == 2 and "fused=True" in caplog.text


@pytest.mark.parametrize("frozen", [False, True])
def test_an_edit_of_a_weight_that_is_not_stepped_is_adopted(frozen, how_many):
    model, optimizer = training(torch.optim.NAdam, "O5")
    model.first.weight.requires_grad_(not frozen)
    backward_batch(model, optimizer, 0)
    if not frozen:
        next(iter(amp.master_params(optimizer))).grad = None
    model.first.weight.data.fill_(0.5)
    optimizer.step()
    assert how_many == [3]
    assert (next(iter(amp.master_params(optimizer))) == 0.5).all() and (model.first.weight == 0.5).all()


@pytest.mark.parametrize("who", ["wrapped", "two_passes"])
def test_other_readers_of_gradients_prevent_portions(who, how_many):
    model, optimizer = training(torch.optim.NAdam, "O5")
    setattr(optimizer._amp_stash, who, True)
    backward_batch(model, optimizer, 0)
    optimizer.step()
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


@pytest.mark.parametrize("device", DEVICES)
def test_only_on_the_cpu(device):
    model = nn.Linear(3, 3).to(device)
    _, optimizer = amp.initialize(model, torch.optim.NAdam(model.parameters()), opt_level="O5", verbosity=0)
    assert (optimizer._amp_stash.masters.waiting is not None) == (device == "cpu")


def test_extra_values_in_groups_allow_portions(how_many):
    """Add entries to the groups that no torch optimizer reads: a different name in each group, a list, a tensor."""
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(200)))
    own: list[Any] = ["name", ["a", "list"], torch.ones(2), None, 0.0]
    groups = [
        {"params": [layer.weight], "name": f"layer {index}", "own": own[index % 5], f"only {index}": index}
        for index, layer in enumerate(model)
    ]
    _, optimizer = amp.initialize(model, torch.optim.NAdam(groups), opt_level="O5", verbosity=0)
    backward(model(torch.ones(1, 2)).float().sum(), optimizer)
    optimizer.step()
    assert how_many == [200]
    assert [group["name"] for group in optimizer.param_groups] == [f"layer {index}" for index in range(200)]


# ----------------------------------------------------------------------------------------------------------------------
# What others see of it


def test_hooks_run_once_a_step_and_see_the_gradients(monkeypatch):
    seen = []
    for way in ("portions", "whole"):
        calls: list[Any] = []

        def look(optimizer: Any, *_: Any) -> None:
            calls.append([None if m.grad is None else m.grad.clone() for m in amp.master_params(optimizer)])  # noqa: B023

        def make(params: Any) -> Any:
            optimizer = torch.optim.NAdam(params)
            optimizer.register_step_pre_hook(look)
            optimizer.register_step_post_hook(look)
            return optimizer

        if way == "whole":
            all_at_once(monkeypatch)
        model, optimizer = training(make, "O2")
        backward_batch(model, optimizer, 0)
        optimizer.step()
        assert len(calls) == 2
        seen.append(calls)
    assert partial_step.same(seen[0], seen[1])


def test_a_hook_s_writes_into_masters_reach_the_weights():
    def halve(optimizer: Any, *_: Any) -> None:
        with torch.no_grad():
            for master in amp.master_params(optimizer):
                master.mul_(0.5)

    def make(params: Any) -> Any:
        optimizer = torch.optim.NAdam(params)
        optimizer.register_step_post_hook(halve)  # before ours
        return optimizer

    model, optimizer = training(make, "O5")
    backward_batch(model, optimizer, 0)
    optimizer.step()
    assert torch.equal(model.first.weight, next(iter(amp.master_params(optimizer))).bfloat16())


def test_a_gradient_that_was_added_to_a_master_counts(how_many):
    model, optimizer = training(lambda params: torch.optim.Rprop(params, lr=0.5), "O5")
    master = next(iter(amp.master_params(optimizer)))
    backward_batch(model, optimizer, 0)
    before = master.detach().clone()
    (master * 1e6).sum().backward()  # which decides all signs
    optimizer.step()
    assert torch.equal(master.detach(), before - 0.5) and how_many == [4]


def test_a_gradient_that_the_optimizer_keeps_is_not_written_over(how_many, monkeypatch):
    class Keeps(Each):
        def direction(self, group: Any, param: Tensor) -> Tensor:
            self.state[param]["last"] = param.grad
            return param.grad

    monkeypatch.setattr(portions, "reason_against", lambda optimizer: None)
    monkeypatch.setattr(portions, "is_torchs", lambda base: True)
    monkeypatch.setattr("amp_patch.training.step.is_untouched", lambda step: True)
    model, optimizer = training(Keeps, "O5")
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
    model, optimizer = training(torch.optim.RMSprop, "O5")
    backward_batch(model, optimizer, 0)
    optimizer.step()
    masters = optimizer._amp_stash.masters.links.masters  # not those of the norm
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


def test_an_interrupt_before_the_first_portion_keeps_the_gradients(monkeypatch):
    """The interrupt may also come while masters adopt an edit of the weights, which writes into masters too."""
    model, optimizer = training(torch.optim.NAdam, "O5")
    backward_batch(model, optimizer, 0)
    before = [master.detach().clone() for master in amp.master_params(optimizer)]

    def interrupted(pairs: Any) -> None:
        for _, link in pairs:
            link.master.mul_(1.0)
            raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        patches.setattr(portions, "settle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    optimizer.step()
    assert not any(map(torch.equal, amp.master_params(optimizer), before))


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_copies_go_in_portions_too(level, how_many):
    model, optimizer = training(torch.optim.NAdam, level)
    backward_batch(model, optimizer, 0)
    optimizer.step()
    model, optimizer = copy.deepcopy((model, optimizer))
    backward_batch(model, optimizer, 1)
    optimizer.step()
    assert len(how_many) == 2

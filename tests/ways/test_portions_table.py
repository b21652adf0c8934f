"""The table `BY_CLASS` of portions.py, compared with trials of every class of torch.optim with every setting."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import versions
from in_portions import Each
from torch import Tensor, nn

from amp_patch.testing import _give_gradients, wave
from amp_patch.ways import portions
from amp_patch.ways.partial_step import PartialStep, same

Group = dict[str, Any]

SHAPES = ((3, 5), (1,), (16,), (), (2, 3, 3), (33,), (7, 2))
MATRICES = ((3, 5), (1, 1), (16, 2), (2, 33), (7, 2))  # Muon takes nothing else

FOREACH = {"foreach": (None, True, False), "maximize": (False, True)}
DECAY = {"lr": (0.01, 1.0), "weight_decay": (0, 0.1), **FOREACH}
ADAM = {**DECAY, "betas": ((0.9, 0.999), (0.0, 0.5)), "eps": (1e-8,)}
# By class the values of its settings that are crossed; of `portions.WHOLE_WITH` no group has one set.
SETTINGS: dict[str, dict[str, tuple[Any, ...]]] = {
    "ASGD": {**DECAY, "lambd": (1e-4, 0.0), "alpha": (0.75,), "t0": (1e6, 2.0)},
    "Adadelta": {**DECAY, "rho": (0.9, 0.0), "eps": (1e-6, 1e-2)},
    "Adafactor": {
        **DECAY,
        "beta2_decay": (-0.8, 0.0),
        "eps": ((None, 1e-3), (1e-8, 1e-3)),
        "d": (1.0, 2.0),
    },
    "Adagrad": {**DECAY, "lr_decay": (0, 0.1), "initial_accumulator_value": (0, 0.1), "eps": (1e-10,)},
    "Adam": {**ADAM, "amsgrad": (False, True), "decoupled_weight_decay": (False, True)},
    "AdamW": {**ADAM, "amsgrad": (False, True)},
    "Adamax": ADAM,
    "LBFGS": {"lr": (1,), "line_search_fn": (None, "strong_wolfe")},
    "Muon": {
        "lr": (0.01, 1.0),
        "weight_decay": (0, 0.1),
        "momentum": (0.0, 0.95),
        "nesterov": (False, True),
        "ns_coefficients": ((3.4445, -4.775, 2.0315),),
        "eps": (1e-7,),
        "ns_steps": (5, 1),
        "adjust_lr_fn": (None, "original", "match_rms_adamw"),
    },
    "NAdam": {**ADAM, "momentum_decay": (4e-3, 0.0), "decoupled_weight_decay": (False, True)},
    "RAdam": {**ADAM, "decoupled_weight_decay": (False, True)},
    "RMSprop": {**DECAY, "alpha": (0.99,), "eps": (1e-8,), "momentum": (0, 0.9), "centered": (False, True)},
    "Rprop": {
        "lr": (0.01, 1.0),
        "etas": ((0.5, 1.2),),
        "step_sizes": ((1e-6, 50), (0.1, 0.5)),
        **FOREACH,
    },
    "SGD": {**DECAY, "momentum": (0, 0.9), "dampening": (0, 0.1), "nesterov": (False, True)},
    "SparseAdam": {"lr": (0.01,), "betas": ((0.9, 0.999),), "eps": (1e-8,), "maximize": (False, True)},
}
HERE = [name for name in SETTINGS if hasattr(torch.optim, name)]


@torch.no_grad()
def why_not_in_portions(base: Any, settings: Group) -> str | None:
    """Why toys of the class with these settings step otherwise in portions than as a whole; None if they do not."""
    random_before = torch.get_rng_state(), random.getstate()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole, portioned = _toy(base, settings), _toy(base, settings)
            plain = base.step.__wrapped__  # beneath the hooks, which torch puts around it when one is made
            calls: list[Any] = []
            whole.register_step_pre_hook(lambda *call: calls.append(call))
            attributes, of_groups = _numbers_of(whole), _of_groups(whole)
            for step in range(4):
                _give_gradients(whole, step)
                _give_gradients(portioned, step)
                plain(whole)
                if not torch.equal(torch.get_rng_state(), random_before[0]) or random.getstate() != random_before[1]:
                    return "it draws random numbers"
                if calls:
                    return "its step calls hooks inside"
                if _of_groups(whole) != of_groups:
                    return "it keeps numbers in its groups"
                if _numbers_of(whole) != attributes:
                    return "it keeps numbers of its own"
                for part in portioned.param_groups:
                    params = [param for param in part["params"] if param.grad is not None]
                    for start in range(0, len(params), 2):
                        plain(PartialStep(portioned, [(part, params[start : start + 2])]).shell)
                if not _agree(whole, portioned):
                    return "a portion by itself is stepped differently"
    except Exception as error:
        return f"it could not be tried ({type(error).__name__}: {error})"
    finally:
        torch.set_rng_state(random_before[0])
        random.setstate(random_before[1])
    return None


def _toy(base: Any, settings: Group) -> Any:
    """Return a new optimizer of the class with small parameters, in two groups with these settings."""
    shapes = MATRICES if base.__name__ == "Muon" else SHAPES
    return base([{"params": _params(shapes, index)} for index in range(2)], **settings)


def _params(shapes: tuple[tuple[int, ...], ...], group: int) -> list[Tensor]:
    return [nn.Parameter(wave(shape, 0.37, index + 10.0 * group, torch.float32)) for index, shape in enumerate(shapes)]


def _of_groups(toy: Any) -> list[Group]:
    return [{name: value for name, value in group.items() if name != "params"} for group in toy.param_groups]


def _numbers_of(toy: Any) -> dict[str, str]:
    return {name: repr(value) for name, value in vars(toy).items() if name not in ("state", "param_groups")}


def _agree(one: Any, other: Any) -> bool:
    """Tell whether parameters and state are equal to the bit, and all state belongs to parameters."""
    both = [[param for group in toy.param_groups for param in group["params"]] for toy in (one, other)]
    states = [[toy.state.get(param, {}) for param in params] for toy, params in zip((one, other), both, strict=True)]
    if any(len(toy.state) > sum(map(bool, state)) for toy, state in zip((one, other), states, strict=True)):
        return False
    return same(both[0], both[1]) and same(states[0], states[1])


def combinations(name: str) -> Iterator[dict[str, Any]]:
    here = made(name).defaults  # an older torch has fewer: Adam of 2.6 no decoupled_weight_decay
    known = {setting: values for setting, values in SETTINGS[name].items() if setting in here}
    for values in product(*known.values()):
        settings = dict(zip(known, values, strict=True))
        if not (name == "SGD" and settings["nesterov"] and (not settings["momentum"] or settings["dampening"])):
            yield settings


def made(name: str, **settings: Any) -> Any:
    return getattr(torch.optim, name)([nn.Parameter(torch.ones(2, 2))], **settings)


@pytest.mark.parametrize("away", [2, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", HERE)
def test_the_table_s_row_of_a_class_holds_with_all_settings(name, away):
    """At once with those that differ from the first combination in two settings at most; with all it is slow."""
    kind = getattr(torch.optim, name)
    first = next(combinations(name))
    for settings in combinations(name):
        if away is not None and sum(settings[setting] != first[setting] for setting in first) > away:
            continue
        reason = why_not_in_portions(kind, settings)
        assert (reason is None) == (portions.BY_CLASS[name] is None), (settings, reason)


def test_the_table_has_every_class_and_setting_of_torchs():
    kinds = [value for value in vars(torch.optim).values() if isinstance(value, type)]
    names = {kind.__name__ for kind in kinds if issubclass(kind, torch.optim.Optimizer)} - {"Optimizer"}
    assert names == set(HERE) and portions.BY_CLASS.keys() == SETTINGS.keys()
    for name in HERE:
        if portions.BY_CLASS[name] is None:
            left = made(name).defaults.keys() - SETTINGS[name].keys() - set(portions.WHOLE_WITH)
            assert not left - ({"decoupled_weight_decay"} if name == "AdamW" else set()), name


class CountsInGroup(Each):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step.__wrapped__(self)


class CountsByItself(Each):
    count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        super().step.__wrapped__(self)


class CountsInState(Each):
    def step(self, closure: Any = None) -> None:
        self.state["count"] = self.state.get("count", 0) + 1
        super().step.__wrapped__(self)


class ByOneNorm(Each):
    """Clips by the norm of all gradients, once that is over 100."""

    def direction(self, group: Any, param: Tensor) -> Tensor:
        grads = [p.grad for each in self.param_groups for p in each["params"] if p.grad is not None]
        return param.grad * (100.0 / nn.utils.get_total_norm(grads)).clamp(max=1.0)


class Noisy(Each):
    def direction(self, group: Any, param: Tensor) -> Tensor:
        return param.grad + torch.randn_like(param)


class NoisyByPython(Each):
    def direction(self, group: Any, param: Tensor) -> Tensor:
        return param.grad * random.random()


class FiresHooks(Each):
    def step(self, closure: Any = None) -> None:
        super().step()


REASONS = {
    CountsInGroup: "keeps numbers in its groups",
    CountsByItself: "keeps numbers of its own",
    CountsInState: "stepped differently",
    ByOneNorm: "stepped differently",
    Noisy: "draws random numbers",
    NoisyByPython: "draws random numbers",
    FiresHooks: "calls hooks inside",
}


@pytest.mark.parametrize("kind", REASONS, ids=lambda kind: kind.__name__)
def test_toys_show_what_no_class_may_do(kind):
    """Else the test of torch's classes shows nothing."""
    before = torch.get_rng_state(), random.getstate()
    assert REASONS[kind] in (why_not_in_portions(kind, {}) or "portions are sound")
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert why_not_in_portions(Each, {"lr": 0.5}) is None


@pytest.mark.parametrize("release", ["2.5.1", "2.16.0a0+git1", "3.0.0"])
def test_for_another_release_of_torch_the_table_is_empty(release, monkeypatch):
    optimizer = made("NAdam")
    assert portions.reason_against(optimizer) is None
    monkeypatch.setattr(torch, "__version__", release)
    assert portions.reason_against(optimizer) == f"torch {release} is not in 2.6 to 2.15, whose optimizers are known"


def test_the_releases_equal_the_tested_ones():
    tested = [tuple(map(int, which.torch.split(".")[:2])) for which in versions.VERSIONS]
    assert (min(tested), max(tested)) == portions.RELEASES


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("NAdam", {"differentiable": True}, "differentiable=True"),
        ("NAdam", {"capturable": True}, "capturable=True"),
        ("Adagrad", {"fused": True}, "fused=True"),
        ("NAdam", {"betas": (torch.tensor(0.9), torch.tensor(0.999))}, "a setting is a tensor"),
        ("RMSprop", {"lr": torch.tensor(0.1)}, "a setting is a tensor"),
    ],
)
def test_settings_of_any_group_that_are_a_reason(name, settings, reason):
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = getattr(torch.optim, name)([{"params": [first]}, {"params": [second]}])
    assert portions.reason_against(optimizer) is None
    optimizer.param_groups[1].update(settings)
    assert portions.reason_against(optimizer) == reason


@pytest.mark.parametrize("write", [lambda group: group.update(lr=0.25), lambda group: group.__setitem__("lr", 0.25)])
def test_a_setting_that_a_partial_step_writes_reaches_the_optimizer_at_once(write):
    optimizer = torch.optim.SGD([torch.ones(1), torch.ones(1)], lr=1.0)
    group = optimizer.param_groups[0]
    partial = PartialStep(optimizer, [(group, group["params"][:1])], at_once=True)
    write(partial.shell.param_groups[0])
    partial.shell.param_groups[0]["params"] = []
    assert group["lr"] == 0.25 and len(group["params"]) == 2

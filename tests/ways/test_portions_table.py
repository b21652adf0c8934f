"""The table `BY_CLASS` of portions.py, compared with trials of every class of torch.optim with every setting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import versions
from torch import nn

from amp_patch import amp
from amp_patch.testing import check_per_parameter_optimizer
from amp_patch.ways import portions

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


def combinations(name: str) -> Iterator[dict[str, Any]]:
    here = made(name).defaults  # an older torch has fewer: Adam of 2.6 no decoupled_weight_decay
    known = {setting: values for setting, values in SETTINGS[name].items() if setting in here}
    for values in product(*known.values()):
        settings = dict(zip(known, values, strict=True))
        if not (name == "SGD" and settings["nesterov"] and (not settings["momentum"] or settings["dampening"])):
            yield settings


def made(name: str, **settings: Any) -> Any:
    shapes = [(3, 5), (5, 2)] if name == "Muon" else [(3, 5), (1,), (), (2, 3, 3)]
    return getattr(torch.optim, name)([nn.Parameter(torch.ones(shape)) for shape in shapes], **settings)


@pytest.mark.usefixtures("registrations")
@pytest.mark.parametrize("away", [1, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", HERE)
def test_the_table_s_row_of_a_class_holds_with_all_settings(name, away):
    """At once with those that differ from the first combination in one setting at most; with all it is slow."""
    kind = getattr(torch.optim, name)
    amp.register_per_parameter_optimizer(kind, fp32_state=["ax"] if name == "ASGD" else [])
    first = next(combinations(name))
    for settings in combinations(name):
        if away is not None and sum(settings[setting] != first[setting] for setting in first) > away:
            continue
        with nullcontext() if portions.BY_CLASS[name] is None else pytest.raises(AssertionError):
            check_per_parameter_optimizer(made(name, **settings))


def test_the_table_has_every_class_and_setting_of_torchs():
    kinds = [value for value in vars(torch.optim).values() if isinstance(value, type)]
    names = {kind.__name__ for kind in kinds if issubclass(kind, torch.optim.Optimizer)} - {"Optimizer"}
    assert names == set(HERE) and portions.BY_CLASS.keys() == SETTINGS.keys()
    for name in HERE:
        if portions.BY_CLASS[name] is None:
            left = made(name).defaults.keys() - SETTINGS[name].keys() - set(portions.WHOLE_WITH)
            assert not left - ({"decoupled_weight_decay"} if name == "AdamW" else set()), name


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

"""Copies and pickles of single objects: models, scalers, policies and results.

Of a model together with its optimizer tests/training/test_events.py has the table.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compared_runs import made_up_run
from torch import nn
from training import DUPLICATES, assert_unchanged, convnet, images

from amp_patch import amp
from amp_patch.apex.amp import scaler as apex_scaler
from amp_patch.comparison.comparison import Comparison
from amp_patch.policy import OPT_LEVELS
from amp_patch.training.loss_scaler import LossScaler

# ---------------------------------------------------------------------------------------------------------------------
# Values


def loss_scaler() -> LossScaler:
    """None of its fields is what it was made with."""
    scaler = LossScaler("dynamic", min_loss_scale=4.0, max_loss_scale=2.0**20, loss_id=3, verbosity=0)
    for overflow in (1.0, 0.0):
        scaler.record(torch.tensor(overflow))
        scaler.update()
    scaler.record(torch.tensor(1.0))  # and waits for its update
    return scaler


def grad_scaler() -> Any:
    """After two of the three overflows that its hysteresis waits for."""
    scaler = amp.GradScaler("cpu", init_scale=64.0, hysteresis=3)
    assert [overflow(scaler) for _ in range(2)] == [64.0] * 2
    return scaler


def overflow(scaler: Any) -> float:
    weight = nn.Parameter(torch.ones(1))
    scaler.scale((weight * float("inf")).sum()).backward()
    scaler.step(torch.optim.SGD([weight]))
    scaler.update()
    return scaler.get_scale()


def apexs_scaler() -> Any:
    scaler = apex_scaler.LossScaler("dynamic")
    scaler._loss_scale = 8.0
    return scaler


def halve(scaler: Any) -> float:
    scaler._loss_scale /= 2
    return scaler._loss_scale


def update(scaler: LossScaler) -> float:
    scaler.update()
    return scaler.loss_scale()


def comparison() -> Comparison:
    return Comparison("train.py", [made_up_run("O0", 0), made_up_run("O2", 0)], asked_steps=50)


def inspection() -> Any:
    model = convnet()
    with amp.inspect(model) as seen:
        model(images(0)[0]).sum().backward()
    return seen


VALUES: dict[str, Callable[[], Any]] = {
    "policy": lambda: OPT_LEVELS["O2"],
    "loss scaler": loss_scaler,
    "GradScaler": grad_scaler,
    "GradScaler, disabled": lambda: amp.GradScaler("cpu", enabled=False),
    "Apex's scaler": apexs_scaler,
    "run": lambda: made_up_run("O2", 0),
    "comparison": comparison,
    "results of levels": lambda: comparison().levels,
    "inspection": inspection,
    "explanation": lambda: amp.explain(convnet(), images(0)[0]),
}


def fields(value: Any) -> Any:
    return value.state_dict() if isinstance(value, torch.amp.GradScaler) else getattr(value, "__dict__", value)


@pytest.mark.parametrize("duplicate", [copy.copy, *DUPLICATES])
@pytest.mark.parametrize("name", VALUES)
def test_a_copy_of_a_value_has_all_of_it(name, duplicate):
    value = VALUES[name]()
    twin = duplicate(value)
    assert type(twin) is type(value)
    assert_unchanged(fields(value), fields(twin))


@pytest.mark.parametrize("duplicate", DUPLICATES)
@pytest.mark.parametrize(
    ("name", "change", "result"),
    [("loss scaler", update, 16384.0), ("GradScaler", overflow, 32.0), ("Apex's scaler", halve, 4.0)],
)
def test_a_copied_scaler_continues_separately(name, change, result, duplicate):
    scaler = VALUES[name]()
    assert [change(duplicate(scaler)) for _ in range(2)] == [result] * 2
    assert change(scaler) == result

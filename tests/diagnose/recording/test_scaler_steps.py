"""Recordings of trainings whose loss a GradScaler of torch's scales, with `initialize` and without."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import DEVICES
from scaled_loops import Cuda, Theirs
from training import linear, same, weights

from amp_patch import amp
from amp_patch.diagnose.recording.run import PARTS

SCALERS = [torch.amp.GradScaler, Theirs, Cuda, amp.GradScaler]


def train_scaled(make, device, level=None, optimizer=torch.optim.SGD, unscales=False, micro_batches=1):
    """Five steps, of which the third overflows; the scale is 1024 and then 512. The weights afterwards."""
    model = linear([[1.0, 2.0]], device)
    optimizer = optimizer(model.parameters(), lr=2.0**-20)
    if level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
    scaler = make(device, init_scale=1024.0)
    for step in range(5):
        optimizer.zero_grad()
        for part in range(micro_batches):
            loss = model(torch.full((3, 2), 1.0 + part, device=device)).float().sum()
            scaler.scale(loss * math.inf if step == 2 else loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
    return weights(model)


CASES = [
    {},
    {"unscales": True},
    {"micro_batches": 2},
    pytest.param({"optimizer": lambda params, lr: torch.optim.SGD(params, lr=lr, fused=True)}, id="fused"),
    {"level": "O0"},
    {"level": "O1"},
    {"level": "O4", "unscales": True, "micro_batches": 2},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("make", SCALERS)
@pytest.mark.parametrize("device", DEVICES)
def test_the_loss_is_before_the_scaler_and_scale_and_skips_are_the_scalers(make, case, device):
    plain = train_scaled(make, device, **case)
    amp.restore()
    with amp.record() as run:
        assert same(train_scaled(make, device, **case), plain)
    amp.restore()
    mean = 13.5 if case.get("micro_batches") == 2 else 9.0
    assert run.loss == pytest.approx([mean, mean, math.inf, mean, mean], rel=1e-3)
    assert run.scale == [1024.0] * 3 + [512.0] * 2
    assert run.skipped == [False, False, True, False, False]
    level = case.get("level")
    assert run.level == (level or "native") and run.device == device and run.error is None and run.notes == []
    assert (
        run.samples == [3 * case.get("micro_batches", 1) if level else 0] * 5
    )  # of torch's own the model is not known
    assert all(map(math.isfinite, run.seconds)) and min(run.parts["optimizer"]) > 0 and min(run.parts["backward"]) > 0
    assert run.seconds == [sum(run.parts[part][step] for part in PARTS) for step in range(5)]


def test_two_losses_of_one_scaler_are_added_and_a_step_is_of_the_first_optimizer():
    models = [linear([[1.0]]), linear([[4.0]])]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with amp.record() as run:
        for _ in range(2):
            for model, optimizer in zip(models, optimizers, strict=True):
                scaler.scale(model(torch.ones(1, 1)).sum()).backward()
                scaler.step(optimizer)
            scaler.update()
        scaler.scale(models[0](torch.ones(1, 1)).sum()).backward()
        scaler.step(optimizers[0])
    assert run.loss == [1.0, 5.0, 5.0] and run.scale == [8.0] * 3


def test_beside_scale_loss_a_loss_counts_once():
    model = linear([[1.0, 2.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
    with amp.record() as run:
        loss = model(torch.ones(3, 2)).sum()
        scaled = scaler.scale(loss)
        with amp.scale_loss(loss, optimizer):
            scaled.backward()
        scaler.step(optimizer)
    assert (run.loss, run.samples, run.steps) == ([9.0], [3], 1)


def test_a_disabled_scaler_is_none_and_nothing_is_left():
    def methods():
        owners = (*SCALERS, torch.cuda.amp.GradScaler)
        return [vars(owner).get(name) for owner in owners for name in ("scale", "unscale_", "step")]

    before = methods()
    with amp.record() as run:
        assert methods() != before
        model = linear([[1.0]])
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), torch.amp.GradScaler("cpu", enabled=False)
        scaler.scale(model(torch.ones(1, 1)).sum()).backward()
        scaler.step(optimizer)
    assert methods() == before and run.steps == 0

"""Optimizers that skip on the device: the host does not wait for the overflow flag, and learns of it later."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
import training
from conftest import DEVICES
from syncs import count

from amp_patch import amp, optimizers
from amp_patch.support import device_sync

MAKERS = {
    "torch's fused Adam": lambda params: torch.optim.Adam(params, lr=1e-2, eps=1e-4, fused=True),
    "torch's fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=True),
    "torch's fused SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, dampening=0.5, fused=True),
    "torch's fused SGD without momentum": lambda params: torch.optim.SGD(params, lr=0.05, fused=True),
    "FusedSGD": lambda params: optimizers.FusedSGD(params, lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.1),
}
LEVELS = {
    "O1": {"opt_level": "O1"},
    "O2": {"opt_level": "O2"},
    "O2 in BF16, split": {"opt_level": "O2", "dtype": torch.bfloat16, "master_weights": "split"},
    "O2 in BF16, stochastic": {"opt_level": "O2", "dtype": torch.bfloat16, "master_weights": "stochastic"},
}
BAD = (0, 3, 4, 7)  # the steps whose gradients overflow: the first, two in a row, and one among clean ones


class Wait:
    """Whether verdicts are on their way still."""

    on = False


@pytest.fixture
def late(monkeypatch):
    """Treat the CPU as a device with syncs. While `late.on`, copies of its flags have not arrived."""
    wait = Wait()
    monkeypatch.setattr(device_sync, "waits", lambda device: True)
    here = device_sync.DeviceNumbers.here
    monkeypatch.setattr(device_sync.DeviceNumbers, "here", lambda self: not wait.on and here(self))
    return wait


def start_dynamic(maker, level, device, verbosity=0):
    model = training.convnet(device=device)
    optimizer = maker(model.parameters())
    return amp.initialize(model, optimizer, **LEVELS[level], loss_scale="dynamic", verbosity=verbosity)


def step(model, optimizer, index):
    images, classes = training.images(index, str(next(model.parameters()).device))
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(images), classes)
    training.backward(loss * (float("inf") if index in BAD else 1.0), optimizer)
    optimizer.step()


def result(model, optimizer):
    """Everything that a step can change, as tensors."""
    state = optimizer.state_dict()
    numbers = [value for entry in state["state"].values() for value in entry.values()]
    numbers += [v for g in state["param_groups"] for v in g.values() if isinstance(v, int | float | torch.Tensor)]
    return [*training.weights(model), *(torch.as_tensor(n).detach().clone().cpu() for n in numbers if n is not None)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_the_device_skips_what_the_host_would(maker, level, device, late, monkeypatch):
    runs = []
    for on_device in (False, True):
        with monkeypatch.context() as patch:
            if not on_device:
                patch.setattr(device_sync, "waits", lambda device: False)
            model, optimizer = start_dynamic(maker, level, device)
            states = []
            for index in range(10):
                step(model, optimizer, index)
                states.append(result(model, optimizer)[0].tolist())
            runs.append((result(model, optimizer), states, amp.state_dict()))
    (by_host, states, scales), (by_device, *told) = runs
    assert [states, scales] == told
    assert [one == other for one, other in itertools.pairwise(states)] == [index in BAD for index in range(1, 10)]
    assert training.same(by_host, by_device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_no_sync_in_a_step_after_the_first(maker, level, device, late):
    late.on = True
    model, optimizer = start_dynamic(maker, level, device)
    for index in (1, 2, 5):
        images, classes = training.images(index, device)
        training.backward(torch.nn.functional.cross_entropy(model(images), classes), optimizer)
        syncs = count(device, optimizer.step)
        optimizer.zero_grad()
        assert syncs == (1 if index == 1 else 0)
    assert "found_inf" not in vars(optimizer) and "grad_scale" not in vars(optimizer)


@pytest.mark.parametrize("device", DEVICES)
def test_verdicts_that_come_late_are_told_in_order(device, late, caplog):
    model, optimizer = start_dynamic(MAKERS["torch's fused Adam"], "O2", device, verbosity=1)
    step(model, optimizer, 1)
    late.on = True
    with caplog.at_level(logging.WARNING, "amp_patch"):
        for index in (2, 3, 5):
            step(model, optimizer, index)
        assert not caplog.records
        late.on = False
        step(model, optimizer, 6)
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "Gradient overflow: skipped the step (skip 1 of loss scaler 0)"
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_after_a_skip_the_host_looks_itself(device, late, caplog):
    """So that the message about many skips can name the parameters."""
    model, optimizer = start_dynamic(MAKERS["FusedSGD"], "O2", device, verbosity=1)
    step(model, optimizer, 1)
    with caplog.at_level(logging.WARNING, "amp_patch"):
        for _ in range(11):
            step(model, optimizer, BAD[0])
    assert "in a row; not finite: body.0.weight (NaN)" in caplog.text


@pytest.mark.parametrize("device", DEVICES)
def test_a_state_that_was_cleared_or_loaded_is_a_first_step_again(device, late):
    """After a skipped first step, torch's fused SGD would use a momentum buffer that was never written."""
    model, optimizer = start_dynamic(MAKERS["torch's fused SGD"], "O1", device)
    for index in (1, 2):
        step(model, optimizer, index)
    saved = optimizer.state_dict()
    empty = {key: {"momentum_buffer": None} for key in saved["state"]}  # as torch's SGD saves it before a first step
    for forget in (optimizer.state.clear, lambda: optimizer.load_state_dict({**saved, "state": empty})):
        forget()
        before = [param.detach().clone() for param in model.parameters()]
        step(model, optimizer, BAD[0])
        assert training.same(before, [param.detach() for param in model.parameters()])
        assert not any(state.get("momentum_buffer") is not None for state in optimizer.state.values())
        for index in (1, 2):
            step(model, optimizer, index)


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_that_raises_leaves_no_flag_behind(device, late):
    model, optimizer = start_dynamic(MAKERS["torch's fused Adam"], "O2", device)
    step(model, optimizer, 1)
    images, classes = training.images(2, device)
    training.backward(torch.nn.functional.cross_entropy(model(images), classes), optimizer)
    master = next(iter(amp.master_params(optimizer)))
    kept, optimizer.state[master]["exp_avg"] = optimizer.state[master]["exp_avg"], "nothing to compute with"
    with pytest.raises((RuntimeError, TypeError, AttributeError)):
        optimizer.step()
    optimizer.state[master]["exp_avg"] = kept
    optimizer.zero_grad()
    assert "found_inf" not in vars(optimizer)
    before = training.weights(model)
    step(model, optimizer, 5)
    assert not training.same(training.weights(model), before)

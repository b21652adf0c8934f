"""Trainings for tests of recordings, and recordings on disk."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

import pytest
import torch
from apexed import apex_amp  # noqa: F401  the fixture `apex`
from training import backward, linear

from amp_patch import amp
from amp_patch.diagnose.recording import forward_hooks
from amp_patch.diagnose.recording import recorder as recording
from amp_patch.diagnose.recording.run import Event, loads
from amp_patch.multi_tensor import backend
from amp_patch.training import observers
from amp_patch.watch import left_out

torch_hooks = sys.modules["torch.optim.optimizer"]


HALF = 2 if backend() == "cpp" else 4  # bytes of a gradient that waits for a step; plain torch makes the master's


def started(level="O2", lr=2.0**-20, optimizer=None, device="cpu", **options):
    """A linear layer with the weights 1 and 2, and its SGD; where the scale moves it starts at 2**10."""
    model = linear([[1.0, 2.0]], device)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr) if optimizer is None else optimizer(model.parameters())
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, max_loss_scale=2.0**10, **options)


def one_step(model, optimizer, inputs=((1.0, 1.0),), factor=1.0, **options):
    optimizer.zero_grad()
    loss = model(torch.tensor(inputs, device=model.weight.device)).sum() * factor
    backward(loss, optimizer, **options)
    optimizer.step()


def foreign(hooks):
    """Return the hooks of all optimizers, without the hooks that watch for left-out weights."""
    return [hook for hook in hooks.values() if hook.__module__ != left_out.__name__]


def untouched():
    """Tell whether the process has no hook or patch of a recorder."""
    return (
        not observers.present
        and not foreign(torch_hooks._global_optimizer_pre_hooks)
        and not foreign(torch_hooks._global_optimizer_post_hooks)
        and not recording._recorders
        and not forward_hooks._listeners
        and not forward_hooks._installation.installed
    )


@pytest.fixture(name="nothing_left", autouse=True)
def nothing_left_fixture():
    assert untouched()
    yield
    assert untouched()


class Clock:
    """A clock that the test sets."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("amp_patch.diagnose.recording.step_clock.clock", lambda: self.now)

    def wait(self, seconds):
        self.now += seconds


def read_lines(lines: Iterable[str]) -> list[Event]:
    """The events of a recording; a last line that was cut off (the process was killed) is left out."""
    events = []
    for line in lines:
        try:
            events.append(loads(line))
        except json.JSONDecodeError:
            break
    return events

"""Ctrl-C at the exit of a context manager."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from interrupts import Raise, Training, surroundings
from torch import Tensor

from amp_patch import amp
from amp_patch.apex.amp import _forks
from amp_patch.apex.amp.opt import OptimWrapper
from amp_patch.training.scaled_backward import ScaledBackward


def entry_of(function: Callable[..., Any], run: Callable[[], Any]) -> int:
    """At which call within `run` the function is called first."""
    seen: list[int] = []

    class Looks(Raise):
        def _look(self, frame: FrameType, event: str, argument: Any) -> None:
            super()._look(frame, event, argument)
            if event == "call" and frame.f_code is function.__code__:
                seen.append(self.count)

    Looks()(run)
    return seen[0]


@pytest.mark.parametrize("keeps_the_traceback", [False, True])
def test_ctrl_c_as_scale_loss_closes(keeps_the_traceback):
    training, before = Training("O2", cpu_half="emulate"), surroundings()
    for _ in range(2):  # the first two iterations import modules, and remove hooks that look for slips
        training.iteration("first")
    at = entry_of(ScaledBackward.close, lambda: training.iteration("first"))
    raised = Raise(at)(lambda: training.iteration("second"))
    assert raised.place[0] is ScaledBackward.close.__code__
    if not keeps_the_traceback:  # as a notebook does
        raised.raised = None
    assert surroundings() == before
    training.iteration("second")


@pytest.mark.parametrize("around", ["OptimWrapper", "combine_ddp"])
def test_ctrl_c_as_what_apex_has_around_scale_loss_closes(around, monkeypatch):
    monkeypatch.setattr(_forks, "_average", lambda targets: None)  # which needs other processes
    training, before = Training("O2"), surroundings()
    handle = SimpleNamespace(is_active=lambda: True)

    def scaling(loss: Tensor) -> Any:
        if around == "OptimWrapper":
            return OptimWrapper(training.optimizer, handle, num_loss=1).scale_loss(loss)
        return _forks.averaged(amp.scale_loss(loss, training.optimizer), training.optimizer)

    def run() -> None:
        with scaling(training.loss("first")) as scaled_loss:
            scaled_loss.backward()

    for _ in range(2):  # a first backward leaves its gradients in low precision, a second adds to them
        run()
    leave = type(scaling(training.loss("first"))).__exit__
    raised = Raise(entry_of(leave, run))(run)
    assert raised.place[0] is leave.__code__
    assert surroundings() == before
    training.iteration("second")  # while the traceback is there


@pytest.mark.parametrize("keeps_the_traceback", [False, True])
def test_ctrl_c_at_the_exit_of_a_region_of_the_user(wrappers, keeps_the_traceback):
    region, before = amp.autocast("cpu", torch.float16), surroundings()

    def run() -> None:
        with region:
            torch.ones(2, 2) @ torch.ones(2, 2)

    run()
    at = entry_of(type(region).leave_block, run)
    raised = Raise(at)(run)
    assert raised.place[0] is type(region).leave_block.__code__
    if not keeps_the_traceback:
        raised.raised = None
    assert surroundings() == before
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32

"""Ctrl-C at the exit of a context manager."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from interrupts import Interrupt, Training, surroundings
from torch import Tensor

from amp_patch import amp
from amp_patch.apex.amp.opt import OptimWrapper
from amp_patch.training.scaled_backward import ScaledBackward


def interrupt_at(function: Callable[..., Any], run: Callable[[], Any]) -> Interrupt:
    """`run`, with Ctrl-C at its first call of the function."""
    seen: list[int] = []

    class Looks(Interrupt):
        def _look(self, frame: FrameType, event: str, argument: Any) -> None:
            super()._look(frame, event, argument)
            if event == "call" and frame.f_code is function.__code__:
                seen.append(self.count)

    Looks()(run)
    interrupted = Interrupt(seen[0])(run)
    assert interrupted.first[0] is function.__code__
    assert interrupted.raised is not None
    return interrupted


def test_ctrl_c_as_scale_loss_closes():
    training, before = Training("O2", cpu_half="emulate"), surroundings()
    for _ in range(3):  # the first three iterations import modules, look at inputs, and remove hooks that find slips
        training.iteration("first")
    _held = interrupt_at(ScaledBackward.__exit__, lambda: training.iteration("first"))
    assert surroundings() == before
    training.iteration("second")


def test_ctrl_c_as_what_apex_has_around_scale_loss_closes():
    training, before = Training("O2"), surroundings()
    handle = SimpleNamespace(is_active=lambda: True)

    def scaling(loss: Tensor) -> Any:
        return OptimWrapper(training.optimizer, handle, num_loss=1).scale_loss(loss)

    def run() -> None:
        with scaling(training.loss("first")) as scaled_loss:
            scaled_loss.backward()

    for _ in range(2):  # a first backward leaves its gradients in low precision, a second adds to them
        run()
    _held = interrupt_at(type(scaling(training.loss("first"))).__exit__, run)
    assert surroundings() == before
    training.iteration("second")  # while the traceback is there


def test_ctrl_c_at_the_exit_of_a_region_of_the_user(wrappers):
    region, before = amp.autocast("cpu", torch.float16), surroundings()

    def run() -> None:
        with region:
            torch.ones(2, 2) @ torch.ones(2, 2)
        surroundings()  # calls at which the signal comes again

    run()
    _held = interrupt_at(type(region).__exit__, run)
    assert surroundings() == before
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32

"""StepClock: which part of a training step runs, and how long each part took, on the host or on a CUDA device."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from amp_patch.diagnose.recording.step import Step

# The phase in which no known part of a step runs: the script fetches data, or clips gradients.
_IDLE = "idle"

clock, cpu_clock = time.perf_counter, time.process_time


class StepClock:
    """A timer of the parts of a step. The recorder calls a method at the start and the end of each part.

    Attributes:
        step: the observations since the last step ended.
        cuda: the device whose events time the training; None if the host's clock does.
    """

    def __init__(self) -> None:
        self.step = Step()
        self.cuda: torch.device | None = None
        self._phase = _IDLE
        self._stepping = False  # inside of an optimizer's step, or of one that an exception has ended
        self._open_bodies = 0
        self.restart()

    def time_on(self, device: torch.device) -> None:
        """Time on `device` from now on, if that is a CUDA device."""
        if device.type == "cuda":
            self.cuda = device
            self.restart()

    def restart(self) -> None:
        """Exclude the time from the end of the last counted part until now from the times of all steps."""
        self._last, self._cpu = self._now(), cpu_clock()

    def take_step(self) -> Step:
        """Return the step that has ended, and begin another."""
        step, self.step = self.step, Step()
        return step

    def forward_begins(self, model: nn.Module) -> bool:
        """Note the beginning of a forward, and return whether it is a forward of the step, whose input has the samples.

        True if `model` is the one whose forward began the running "forward" part of the step. False for other models,
        inside of that one or called after it, and for a forward that a checkpoint recomputes in backward.
        """
        # No hook notifies of the end of a GradScaler's backward. It has ended at the latest when a forward begins.
        if not self._open_bodies and torch._C._current_graph_task_id() == -1:
            self.backward_ends()
        if self._phase is _IDLE:
            self._mark("optimizer" if self._stepping else "data")
            self._phase = "forward"
            self.step.forward_seen = True
            self.step.first = id(model)
        return self._phase == "forward" and self.step.first == id(model)

    def body_begins(self) -> None:
        """Note the entry of a `scale_loss`."""
        self._open_bodies += 1
        if self._open_bodies == 1:
            self._mark("optimizer" if self._stepping and self._phase is _IDLE else self._part_before_loss())
            self._phase = "backward"

    def body_ends(self) -> None:
        """Note the exit of a `scale_loss`."""
        self._open_bodies = max(0, self._open_bodies - 1)
        if self._open_bodies == 0:
            self._mark("backward")
            self._phase = _IDLE

    def loss_given_to_scaler(self) -> None:
        """Note a call of `scaler.scale(loss)`, before the backward."""
        if self._phase != "backward":
            self._mark(self._part_before_loss())
            self._phase = "backward"

    def backward_ends(self) -> None:
        """Note the end of a backward. If none is running, do nothing."""
        if self._phase == "backward":
            self._mark("backward")
            self._phase = _IDLE

    def step_begins(self) -> None:
        """Note the start of an optimizer's step. Another call before `step_ends` (by `super().step()`) does nothing."""
        if not self._stepping:
            self._mark("between" if self._phase is _IDLE else self._phase)
            self._stepping = True

    def step_ends(self) -> None:
        """Note the end of the optimizer's step."""
        self._mark("optimizer")
        self._stepping = False
        self._phase = "backward" if self._open_bodies else _IDLE

    def _part_before_loss(self) -> str:
        return "forward" if self.step.forward_seen else "data"

    def _now(self) -> Any:
        """Return the host's time in seconds, or for a training on CUDA an event recorded on its stream. No sync."""
        if self.cuda is None:
            return clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.cuda))
        return event

    def _mark(self, part: str) -> None:
        """Add the time since the last call of `_mark` or `restart` to `part` of the step, one of `PARTS`."""
        last, cpu = self._last, self._cpu
        self.restart()
        self.step.spans.append((part, last, self._last))
        self.step.cpu_seconds += self._cpu - cpu

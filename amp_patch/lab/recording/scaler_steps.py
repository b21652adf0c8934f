"""What a GradScaler of torch's does in a recorded training: its losses, its scale, the steps that it skips.

The training may be one that `initialize` knows, whose losses go to the scaler in place of `scale_loss`, or torch's
alone: then its loss, its scale, its skips and its times are known, and its model is not, so that the time until
`scaler.scale(loss)` is "data".
"""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_patch.lab.recording.outbox import Outbox
from amp_patch.lab.recording.run import NATIVE
from amp_patch.lab.recording.step import Body, Step
from amp_patch.support import distributed
from amp_patch.training.innermost_optimizer import innermost
from amp_patch.training.observers import Observer
from amp_patch.training.stash import Stash, stash_of
from amp_patch.training.training import Training

# What runs when no part of a step has been told: data is fetched, or gradients are clipped.
IDLE = "idle"

clock = time.perf_counter


class _Scaled(NamedTuple):
    """A loss that a scaler was given.

    Attributes:
        source: the loss itself, which `scale_loss` may be given too.
        loss, scale: copies of it and of the scale.
        samples: how many came before it.
    """

    source: weakref.ref[Tensor]
    loss: Tensor
    scale: Tensor
    samples: int


class ScalerSteps(Observer, ABC):
    """The part of a recorder that hears of GradScalers, and its clock. A `Recorder` is one."""

    losses: int
    _adopted: list[Training]
    _cuda: torch.device | None
    _device: str
    _last: Any
    _open_bodies: int
    _outbox: Outbox
    _phase: str
    _step: Step
    _stepping: bool

    def __init__(self) -> None:
        self._scaled: dict[int, list[_Scaled]] = {}  # id of a scaler -> its losses since it last stepped an optimizer
        self._by_scaler: Any = None  # the optimizer that a scaler steps now

    @abstractmethod
    def is_recording(self) -> bool: ...

    @abstractmethod
    def _know(self, stash: Stash) -> None: ...

    @abstractmethod
    def _end_step(self, optimizer: Any, stash: Stash | None, skipped: Tensor | None = None) -> None: ...

    def loss_given_to_scaler(self, scaler: Any, loss: Tensor, scaled: Tensor, scale: Tensor) -> None:
        if not self.is_recording() or not scaled.requires_grad:
            return
        if self._phase != "backward":
            self._mark("forward" if self._phase == "forward" or self._step.forward_seen else "data")
            self._phase = "backward"
        value = single_value(loss)
        self._scaled.setdefault(id(scaler), []).append(_Scaled(weakref.ref(loss), value, scale, self._step.came))
        self._step.came = 0

    def _leave_backward(self) -> None:
        """A forward begins outside of a body: what a scaler's loss has begun is over, a while ago."""
        if self._phase == "backward" and not self._open_bodies and torch._C._current_graph_task_id() == -1:
            self._mark("backward")
            self._phase = IDLE

    def loss_scaled(self, body: Any, loss: Tensor) -> None:
        """Forget that a scaler was given this loss: the body will tell of it."""
        for scaled in self._scaled.values():
            for found in [each for each in scaled if each.source() is loss]:
                scaled.remove(found)
                self._step.came = found.samples

    def scaler_unscales(self, scaler: Any, optimizer: Any) -> None:
        if self.is_recording() and self._phase == "backward" and self._scaled.get(id(scaler)):
            self._mark("backward")
            self._phase = IDLE

    def scaler_steps(self, scaler: Any, optimizer: Any) -> None:
        optimizer = innermost(optimizer)
        scaled = self._scaled.pop(id(scaler), [])
        if not self.is_recording() or not self._records(optimizer):
            return
        self._by_scaler = optimizer
        own = (id(optimizer),)
        for each in scaled:
            self.losses += 1
            self._step.bodies.append(Body(each.loss, each.scale, 0, (id(scaler), *own), own, each.samples))
        if not self._stepping:
            self._mark("between" if self._phase is IDLE else self._phase)
            self._stepping = True

    def scaler_stepped(self, scaler: Any, optimizer: Any, skipped: Tensor | None) -> None:
        stepped, self._by_scaler = self._by_scaler, None
        if stepped is not None and skipped is not None and self.is_recording():
            self._end_step(stepped, recorded(stepped), skipped)

    def _records(self, optimizer: Any) -> bool:
        """Whether the steps of an optimizer that a scaler steps are recorded; of torch's own trainings the first."""
        if (stash := recorded(optimizer)) is not None:
            self._know(stash)
        elif not (self._adopted or self._device):
            device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
            self._device = device.type
            if device.type == "cuda":
                self._cuda = device
                self._last = self._now()
            policy = "torch's own: a GradScaler"
            self._outbox.put({"event": "begin", "level": NATIVE, "policy": policy, "device": self._device})
        return stash is not None or not self._adopted

    # Times.

    def _now(self) -> Any:
        """This moment: for a training on CUDA when the device gets there."""
        if self._cuda is None:
            return clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._cuda))
        return event

    def _mark(self, part: str) -> None:
        """What ran since the last mark was this part of the step."""
        now = self._now()
        self._step.spans.append((part, self._last, now))
        self._last = now


def recorded(optimizer: Any) -> Stash | None:
    """The stash of an optimizer whose training is enabled."""
    stash = stash_of(optimizer)
    if stash is None or not stash.enabled:
        return None
    owner = stash.neighbours.owner
    return stash if owner is not None and owner() is optimizer else None


def single_value(loss: Tensor) -> Tensor:
    """A copy of the loss; of several numbers their mean."""
    value = distributed.local(loss.detach())
    return value.clone() if value.numel() == 1 else value.double().mean()

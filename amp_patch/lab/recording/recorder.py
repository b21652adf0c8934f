"""Record what happens in `initialize`, `scale_loss` and the optimizers' steps: losses, times, scales, skips, sizes.

While somebody records, and only then, the trainings have an observer, and the models a hook before their forward,
compiled models too. Nothing that is recorded makes a step wait for a device: numbers on a device are copied when the
device gets there, and read later.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.lab.recording import compiled_forwards, size_advice
from amp_patch.lab.recording.activations import WeighedStep
from amp_patch.lab.recording.inspected_step import InspectedStep
from amp_patch.lab.recording.outbox import Outbox
from amp_patch.lab.recording.peak_memory import PeakMemory
from amp_patch.lab.recording.run import Event, Run
from amp_patch.lab.recording.scaler_steps import IDLE, ScalerSteps, recorded, single_value
from amp_patch.lab.recording.sinks import Sink, sinks_for
from amp_patch.lab.recording.size_advice import SizeAdvice
from amp_patch.lab.recording.sizes import Sizes, alive
from amp_patch.lab.recording.step import Body, Step, samples_of
from amp_patch.lab.recording.unread_events import UnreadEvent
from amp_patch.policy import OPT_LEVELS
from amp_patch.support import distributed
from amp_patch.support.compiled import eager_only
from amp_patch.support.forward_hook import ForwardHook
from amp_patch.training import observers
from amp_patch.training import training as training_module
from amp_patch.training.scaled_backward import ScaledBackward
from amp_patch.training.stash import Stash
from amp_patch.training.training import Training

_OTHERS = 100  # so many steps of other optimizers in a row tell that the first one is done

_lock = threading.Lock()
_recorders: list[Recorder] = []


class Enough(SystemExit):
    """The training has taken the steps that were asked for; to Python an exit without an error."""

    def __init__(self) -> None:
        super().__init__(0)


@contextmanager
def record(to: Any = None, *, inspect: bool = False, activations: bool = False) -> Iterator[Run]:
    """Record the training that runs in the block::

        with amp.record("curves.jsonl") as run:
            train(model, optimizer)
        print(run.loss[-1], run.peak_memory)

    What runs through `scale_loss` and `optimizer.step()` is recorded; `initialize` is called inside of the block or
    before it. Of torch's own mixed precision it is what runs through a GradScaler; the model is not known then. There
    may be several recordings at once. No step waits for the device because of it. Figures arrive every half second or
    50 steps, and when the block ends. Of the processes of a distributed job the first writes the file. A disk that is
    full ends the file, with a warning, and not the training.

    Args:
        to: a path, for one line of JSON an event; a TensorBoard SummaryWriter, or what else has
            `add_scalar(tag, value, step)`; None for the `Run` alone.
        inspect: also look, as `amp.inspect` does, at the step after 1, 10, 100, ... steps, whose times are then NaN.
        activations: count the bytes that the third step saves for its backward; see `Run.activations`. Its times are
            then NaN.

    Yields:
        The `Run`, which fills.

    Raises:
        TypeError, OSError: `to` cannot be written to, from the beginning.
    """
    run = Run(level="")
    with Recorder([run, *sinks_for(to)], inspect=inspect, activations=activations):
        yield run


def log(**scalars: Any) -> None:
    """Give figures of the script's own to whoever records, by their names: `amp.log(held_out_loss=1.2)`.

    They belong to the number of optimizer steps that were taken until now. Without a recorder nothing happens.

    Args:
        scalars: numbers, or tensors of one element, which are copied now and read later: this does not sync.

    Raises:
        TypeError: anything else.
    """
    for name, value in scalars.items():
        number = isinstance(value, Real)
        if not (number or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex())):
            what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
            raise TypeError(f"log: {name} is {what}; wanted a number or a tensor of one element")
    for recorder in tuple(_recorders):
        if recorder.is_recording():
            recorder.log(scalars)


class Recorder(ScalerSteps):
    """Records the trainings of this process while its block runs, as events (see `Run.add`) to the sinks.

    A step ends when the first optimizer that ever stepped has stepped again; what others do until then (a GAN's) is in
    the same record. If others step a hundred times meanwhile, one of them takes its place. What the recorder itself
    does between two steps is in nobody's time. Where a compiled function hides the model's forward, its time is in
    "data".

    Args:
        sinks: each has `add(event)`; `flush` and `close`, where it has them, are called too.
        stop_after: leave the training after so many steps, by raising `Enough` out of `optimizer.step()`.
        inspect: emit a "look" of the step after 1, 10, 100, ... steps. The times of such a step are NaN.
        activations: emit a "memory" of the third step, or of the last if that comes before; its times are NaN too.

    Attributes:
        trainings: how many calls of `initialize` were seen, those with `enabled=False` among them, and trainings that
            began before the recording.
        enabled: whether any of them was enabled.
        losses: how many bodies of `scale_loss` were seen.
        steps: how many steps were recorded.
    """

    def __init__(
        self, sinks: Sequence[Any], *, stop_after: int | None = None, inspect: bool = False, activations: bool = True
    ) -> None:
        if stop_after is not None and (isinstance(stop_after, bool) or stop_after < 1):
            raise ValueError(f"Recorder: stop_after is {stop_after!r}; wanted a positive integer, or None")
        self.trainings = self.losses = self.steps = 0
        self.enabled = False
        self.process = os.getpid()
        self._sinks: list[Sink] = list(sinks)
        self._stop_after = stop_after
        self._inspect = inspect
        self._weigh_after = min(3, stop_after or 3) - 1 if activations else 0

    def __enter__(self) -> Recorder:
        ScalerSteps.__init__(self)
        self._adopted: list[Training] = []
        self._scalers: set[int] = set()  # ids of their lists of scalers, by which an optimizer's training is known
        self._handles: list[Any] = []
        self._hooked: list[weakref.ref[nn.Module]] = []
        # A compiled model -> which of the hooked ones it is or has inside; None where it is another model.
        self._compiled = weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module] | None]()
        self._lead: weakref.ref[Any] | None = None
        self._device = ""
        self._cuda: torch.device | None = None  # on which the training is timed
        self._losses: dict[int, Tensor] = {}  # id of a body that runs -> a copy of its loss
        self._outbox = Outbox(self._sinks)
        self._sizes = Sizes(self._adopted)
        self._size_advice = SizeAdvice(lambda lines: self._outbox.put({"event": "advice", "lines": lines}))
        self._measure_after = 1
        self._inspected: InspectedStep | WeighedStep | None = None
        self._peak = PeakMemory()
        self._phase = IDLE
        self._stepping = False
        self._open_bodies = 0
        self._step = Step()
        self._last = self._now()
        compiled_forwards.add(self._compiled_begins)
        for training in training_module.trainings:
            self._hook(training)
        with _lock:
            _recorders.append(self)
        observers.add(self)
        return self

    def __exit__(self, *_: Any) -> None:
        observers.remove(self)
        with _lock:
            _recorders.remove(self)
        compiled_forwards.remove(self._compiled_begins)
        self._size_advice.leave()
        for handle in self._handles:
            handle.remove()
        if os.getpid() != self.process:  # a fork has left the block too
            return
        try:
            if self._inspected is not None:  # its step never ended
                self._inspected.abandon()
                self._inspected = None
            self._sizes.measure()
            peak = self._peak.read(self._device or "cpu")
            self._outbox.put({"event": "end", **self._sizes.bytes, "peak_memory": peak})
            self._flush(wait=True)
        finally:
            self._outbox.close(self.steps)

    def is_recording(self) -> bool:
        """Whether this is the process that records: a fork inherits its parent's recorders. Not while CUDA captures."""
        capturing = self._cuda is not None and torch.cuda.is_current_stream_capturing()
        return self.process == os.getpid() and not capturing

    # What happens in the training.

    def training_begun(self, training: Training | None) -> None:
        if not self.is_recording():
            return
        self.trainings += 1
        if training is not None:
            self._lead = None  # the optimizer of an earlier training may be alive though that training is over
            self._hook(training)
            self._adopt(training)
            if not self.steps:
                self._last = self._now()  # the time before the training began is not the first step's

    @eager_only
    def _adopt(self, training: Training) -> None:
        """Take this training for one that is recorded."""
        self.enabled = True
        self._adopted.append(training)
        self._scalers.add(id(training.scalers))
        begun = self._adopted[0].policy
        if len(self._adopted) == 1:
            device = self._sizes.device()
            self._device = device.type
            if device.type == "cuda":
                self._cuda = device
                self._last = self._now()
            dtype = None if OPT_LEVELS[begun.opt_level].changes_nothing else str(begun.dtype).removeprefix("torch.")
            self._outbox.put(
                {
                    "event": "begin",
                    "level": begun.opt_level,
                    "dtype": dtype,
                    "policy": str(begun),
                    "device": self._device,
                    "lost_eps": self._sizes.lost_eps(),
                }
            )
        elif training.policy != begun:
            self._note(f"initialize was called again, with another policy: {training.policy}")

    def _hook(self, training: Training) -> None:
        for model in alive(training.models):
            compiled_forwards.watch(model)
            if not self._is_hooked(model):
                self._hooked.append(weakref.ref(model))
                self._compiled.clear()
                self._handles.append(
                    model.register_forward_pre_hook(ForwardHook(self._eager_forward_begins), with_kwargs=True)
                )

    def _is_hooked(self, model: nn.Module) -> bool:
        return any(ref() is model for ref in self._hooked)

    def _compiled_begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """A compiled model was called, be it one that is trained here or another."""
        if not self.is_recording():
            return
        if model not in self._compiled:
            # It may be a hooked model itself, or one around it: DistributedDataParallel, or a module with the loss.
            self._compiled[model] = next((weakref.ref(m) for m in model.modules() if self._is_hooked(m)), None)
        ref = self._compiled[model]
        if ref is not None and (trained := ref()) is not None:
            self._forward_begins(trained, args, kwargs)

    def _know(self, stash: Stash) -> None:
        """Adopt the training of an optimizer that was initialized before the recording began."""
        if id(stash.scalers) not in self._scalers:
            for training in training_module.trainings:
                if stash.scalers is training.scalers:
                    self.trainings += 1
                    self._adopt(training)

    def _eager_forward_begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._forward_begins(model, args, kwargs)
        if self._device in size_advice.DEVICES and torch.is_grad_enabled() and self.is_recording():
            self._size_advice.forward_begins(model)

    def _forward_begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or not self.is_recording():
            return  # an evaluation
        self._leave_backward()
        if self._phase is IDLE:
            self._mark("optimizer" if self._stepping else "data")
            self._phase = "forward"
            self._step.forward_seen = True
            self._step.first = id(model)
        elif self._phase != "forward" or self._step.first != id(model):
            return  # this forward is part of another model's, or recomputes one in backward
        if isinstance(self._inspected, WeighedStep):
            self._inspected.came(args, kwargs)
        self._step.came = samples_of(args, kwargs)  # of the newest forward: no body has followed an earlier one

    def body_begins(self, body: ScaledBackward) -> None:
        if not self.is_recording():
            return
        for stash in body.stashes:
            self._know(stash)
        self._open_bodies += 1
        if self._open_bodies > 1:
            return
        seen = self._phase == "forward" or self._step.forward_seen
        self._mark("optimizer" if self._stepping and self._phase is IDLE else "forward" if seen else "data")
        self._phase = "backward"

    def loss_scaled(self, body: ScaledBackward, loss: Tensor) -> None:
        if self.is_recording():
            super().loss_scaled(body, loss)
            self._losses[id(body)] = single_value(loss)

    def body_ends(self, body: ScaledBackward) -> None:
        loss = self._losses.pop(id(body), None)
        if not self.is_recording():
            return
        self._open_bodies = max(0, self._open_bodies - 1)
        if self._open_bodies == 0:
            self._mark("backward")
            self._phase = IDLE
        if loss is not None and not body.failed:
            self.losses += 1
            self._step.bodies.append(Body.of(body, loss, self._step.came))
            self._step.came = 0
            if self.steps < 2:
                self._sizes.measure_gradients()

    def step_begins(self, optimizer: Any) -> None:
        stash = recorded(optimizer)
        if stash is None or not self.is_recording():
            return
        self._know(stash)
        if not self._stepping:  # else this is the step of a parent class, called by its subclass's step
            self._mark("between" if self._phase is IDLE else self._phase)
            self._stepping = True

    def step_ends(self, optimizer: Any) -> None:
        stash = recorded(optimizer)
        if stash is None or stash.step.depth or not self.is_recording():  # a subclass's step has called its parent's
            return
        if self._by_scaler is not optimizer:
            self._end_step(optimizer, stash)

    def _end_step(self, optimizer: Any, stash: Stash | None, skipped: Tensor | None = None) -> None:
        self._mark("optimizer")
        self._stepping = False
        self._phase = "backward" if self._open_bodies else IDLE
        if self._has_enough():  # the script has caught `Enough`, and trains on
            self._step = Step()
            raise Enough
        if self._lead is None or self._lead() is None or self._step.others >= _OTHERS:
            self._lead = weakref.ref(optimizer)
        if self._lead() is not optimizer:
            self._step.others += 1
            return
        self._finish_step(optimizer, stash, skipped)
        self._last = self._now()
        if self._has_enough():
            raise Enough

    def _has_enough(self) -> bool:
        return self._stop_after is not None and self.steps >= self._stop_after

    def _finish_step(self, optimizer: Any, stash: Stash | None, skipped: Tensor | float | None) -> None:
        step, self._step = self._step, Step()
        self.steps += 1
        if skipped is None:
            assert stash is not None
            # Of a step that skips on the device the verdict is the newest there; others leave none.
            skipped = stash.device_skips[-1].overflow if stash.device_skips else float(stash.last_skipped)
        was_inspected = self._inspected is not None
        self._outbox.put_unread(step.unread_event(optimizer, skipped, was_inspected))
        if self._inspected is not None:
            self._leave_inspected()
        if self.steps == self._measure_after:  # now, because the models may be gone when the recording ends
            self._measure_after *= 4
            self._sizes.measure()
        if self._outbox.is_due():
            self._flush()
        if self._inspect and stash is not None and not self._has_enough() and _is_power_of_ten(self.steps):
            self._inspect_next(optimizer, stash)
        elif self.steps == self._weigh_after:
            self._inspected = WeighedStep(self._sizes.at_rest(), self.steps, self._cuda)

    # Inspections of single steps.

    @eager_only
    def _inspect_next(self, optimizer: Any, stash: Stash) -> None:
        models = alive(stash.neighbours.models) or [m for training in self._adopted for m in alive(training.models)]
        if not models:
            return
        self._peak.pause()
        try:
            self._inspected = InspectedStep(models[0], optimizer, self.steps)
        except (ValueError, RuntimeError) as error:
            self._note(str(error))

    @eager_only
    def _leave_inspected(self) -> None:
        assert self._inspected is not None
        inspected, self._inspected = self._inspected, None
        try:
            self._outbox.put(inspected.leave())
        except (ValueError, RuntimeError) as error:
            self._note(f"inspect: {error}")
        self._peak.resume()

    # What goes to the sinks.

    @eager_only
    def log(self, scalars: dict[str, Any]) -> None:
        """Emit the figures of one `amp.log`."""
        for name, value in scalars.items():
            number = distributed.local(value.detach()).clone() if isinstance(value, Tensor) else float(value)
            event = {"event": "log", "step": self.steps, "name": name}
            self._outbox.put_unread(UnreadEvent([number], partial(_logged, event)))

    def _note(self, text: str) -> None:
        self._outbox.put({"event": "note", "text": text})

    @eager_only
    def _flush(self, wait: bool = False) -> None:
        self._outbox.flush(self.steps, wait)
        if self._cuda is not None:
            self._peak.bank()  # a script may reset torch's peak itself, once an epoch


def _logged(event: Event, values: list[float]) -> Event:
    return {**event, "value": values[0]}


def _is_power_of_ten(number: int) -> bool:
    return str(number).strip("0") == "1"

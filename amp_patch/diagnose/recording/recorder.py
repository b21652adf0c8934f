"""Record what happens in `initialize`, `scale_loss` and the optimizers' steps: losses, times, scales, skips, sizes.

While a recording runs, the trainings have an observer, and the models, compiled ones too, have a hook before their
forward. No recording makes a step sync: numbers on a device are copied asynchronously and read later.
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

from amp_patch.diagnose.recording.activations import WeighedStep
from amp_patch.diagnose.recording.forward_hooks import ForwardHooks
from amp_patch.diagnose.recording.module_names import module_names
from amp_patch.diagnose.recording.outbox import Outbox, UnreadEvent
from amp_patch.diagnose.recording.peak_memory import PeakMemory
from amp_patch.diagnose.recording.run import NATIVE, Event, Run
from amp_patch.diagnose.recording.sampled_updates import SampledUpdates
from amp_patch.diagnose.recording.sinks import Sink, sinks_for
from amp_patch.diagnose.recording.sizes import Sizes, alive
from amp_patch.diagnose.recording.step import Body, ScalerLosses, first_tensor, sample, single_value, sizes_of
from amp_patch.diagnose.recording.step_clock import StepClock
from amp_patch.environment import name_of
from amp_patch.policy import OPT_LEVELS
from amp_patch.support import distributed
from amp_patch.support.compiled import eager_only
from amp_patch.training import observers
from amp_patch.training.innermost import innermost
from amp_patch.training.training import Training, training_of, trainings
from amp_patch.watch import questions

_OTHERS = 100  # after this number of consecutive steps of other optimizers, the lead counts as finished

_lock = threading.Lock()
_recorders: list[Recorder] = []


class Enough(SystemExit):
    """Exit of a training that has taken the requested number of steps: a SystemExit, raised with status 0."""


@contextmanager
def record(to: Any = None, *, activations: bool = False) -> Iterator[Run]:
    """Record the training that runs in the block::

        with amp.record("curves.jsonl") as run:
            train(model, optimizer)
        print(run.loss[-1], run.peak_memory)

    Calls of `scale_loss` and `optimizer.step()` are recorded. `initialize` may be called inside the block or before it.
    In a training with torch's mixed precision the calls of its GradScaler are recorded, without the model. Several
    recordings may run at once. No step syncs because of a recording. Figures arrive every half second or 50 steps, and
    when the block ends. In a distributed job rank 0 writes the file. A full disk ends the file, with a warning, and not
    the training.

    Args:
        to: a path, for one line of JSON an event; a TensorBoard SummaryWriter, or another object with
            `add_scalar(tag, value, step)`; None for the `Run` alone.
        activations: count the bytes that the third step saves for its backward; see `Run.activations`. Its times are
            then NaN.

    Yields:
        The `Run`, which is filled as the training goes on.

    Raises:
        TypeError: `to` has another type.
        OSError: the file cannot be opened.
    """
    run = Run(level="")
    recorder = Recorder([run, *sinks_for(to)], activations=activations)
    try:
        with recorder:
            yield run
    finally:
        recorder.close()


def log(**scalars: Any) -> None:
    """Record the script's own figures by name: `amp.log(held_out_loss=1.2)`.

    They are stored with the number of optimizer steps until now. Without a recorder the call does nothing.

    Args:
        scalars: numbers, or tensors of one element, which are copied now and read later: this does not sync.

    Raises:
        TypeError: a scalar is something else.
        ValueError: a number is too large for a float.
    """
    for name, value in scalars.items():
        number = isinstance(value, Real)
        if not (number or (isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex())):
            what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
            raise TypeError(f"log: {name} is {what}; wanted a number or a tensor of one element")
        try:
            _ = float(value) if number else value
        except OverflowError:
            raise ValueError(f"log: {name} is larger than any float; wanted a number that a float can hold") from None
    for recorder in tuple(_recorders):
        if recorder.is_recording():
            recorder.log(scalars)


class Recorder(observers.Observer):
    """A recorder that sends the trainings of this process to sinks, as events (see `Run.add`), while its block runs.

    The optimizer that steps first is the lead: each of its steps ends one recorded step. Steps of other optimizers (a
    GAN's) belong to the recorded step in which they happen. If other optimizers step a hundred times without the lead,
    one of them becomes the lead. The recorder's own time between two steps is not counted. If a compiled function hides
    the model's forward, the forward's time is counted as "data".

    A GradScaler of torch is recorded too: its losses, its scale and its skipped steps. The training may have gone
    through `initialize`, with a GradScaler instead of `scale_loss`. Otherwise the model is not known, and the time
    until `scaler.scale(loss)` is counted as "data".

    Args:
        sinks: objects with `add(event)`, and optionally `flush` and `close` (called by the recorder's `close`).
        stop_after: leave the training after this number of steps, by raising `Enough` out of `optimizer.step()`.
        activations: emit a "memory" event of the third step, or of the last of fewer; its times are NaN.
        batch_dim: the dimension of the model's first tensor that counts the samples.
        modules: emit a "modules" event with the names of the modules of each training's models.

    Attributes:
        enabled: whether a training was seen. With `enabled=False`, `initialize` makes none.
        losses: how many losses were seen, of `scale_loss` and of GradScalers.
        steps: how many steps were recorded.
        forwards: how often a model was called with gradients.
        evaluated: whether a model was called without gradients, as by an evaluation.
    """

    def __init__(
        self,
        sinks: Sequence[Any],
        *,
        stop_after: int | None = None,
        activations: bool = True,
        batch_dim: int = 0,
        modules: bool = False,
    ) -> None:
        if stop_after is not None and (isinstance(stop_after, bool) or stop_after < 1):
            raise ValueError(f"Recorder: stop_after is {stop_after!r}; wanted a positive integer, or None")
        self.losses = self.steps = self.forwards = 0
        self.enabled = self.evaluated = False
        self.process = os.getpid()
        self._outbox = Outbox(list[Sink](sinks))
        self._stop_after = stop_after
        self._batch_dim = batch_dim
        self._tells_modules = modules
        self._weigh_after = min(3, stop_after or 3) - 1 if activations else 0

    def __enter__(self) -> Recorder:
        self._adopted: list[Training] = []
        self._lead: weakref.ref[Any] | None = None
        self._device = ""
        self._losses: dict[int, Tensor] = {}  # id of an open body -> a copy of its loss
        self._scaler_losses = ScalerLosses()
        self._stepped_by_scaler: Any = None  # the optimizer whose step a GradScaler has begun
        self._sizes = Sizes(self._adopted)
        self._start: list[Tensor | float] = []  # weights and inputs of the first forward
        self._measure_after = 1
        self._ended = False
        self._weighed: WeighedStep | None = None  # the step that runs, if the bytes that it saves are counted
        self._updates = SampledUpdates()
        self._peak = PeakMemory()
        self._clock = StepClock()
        self._hooks = ForwardHooks(self._forward_begins)
        for training in trainings:
            self._hooks.add(alive(training.models))
        with _lock:
            _recorders.append(self)
        observers.add(self)
        return self

    def __exit__(self, *_: Any) -> None:
        observers.remove(self)
        with _lock:
            _recorders.remove(self)
        self._hooks.remove()
        if os.getpid() != self.process:  # a fork leaves the block as well, with its parent's events
            return
        if not self._ended:
            self._end()
        self._flush(wait=True)

    def _end(self) -> None:
        """Queue the "end" event, with the sizes and the peak memory."""
        self._ended = True
        if self._weighed is not None:
            self._weighed.abandon()
        self._sizes.measure()
        peak = self._peak.read(self._device or "cpu")
        sizes = {**self._sizes.bytes, "unfinished": self.is_in_a_step, "forwards": self.forwards}
        end = {"event": "end", **sizes, "peak_memory": peak}
        self._outbox.put_unread(UnreadEvent(self._start, lambda numbers: {**end, "start": numbers}))

    def close(self, *events: Event) -> None:
        """Send `events` to the sinks, after the "end" event, and close the sinks. Does nothing in a fork."""
        if os.getpid() != self.process:
            return
        try:
            for event in events:
                self._outbox.put(event)
            self._outbox.flush(self.steps, wait=True)
        finally:
            self._outbox.close(self.steps)

    def is_recording(self) -> bool:
        """Tell whether to record: in the recorder's process, not a fork of it, and outside of a CUDA capture."""
        capturing = self._clock.cuda is not None and torch.cuda.is_current_stream_capturing()
        return self.process == os.getpid() and not capturing

    # Events of a training, as an `Observer` of it.

    def training_begun(self, training: Training | None) -> None:
        if training is not None and self.is_recording():
            self._lead = None  # without this, an earlier training's optimizer would still delimit the steps
            self._hooks.add(alive(training.models))
            self._adopt(training)
            if not self.steps:
                self._clock.restart()  # without this, the first step would include the time before `initialize`

    @eager_only
    def _adopt(self, training: Training) -> None:
        """Add the training to the recorded ones. Queue its "modules" event, and a "begin" event if it is the first."""
        self.enabled = True
        self._adopted.append(training)
        begun = self._adopted[0].policy
        if len(self._adopted) == 1:
            device = self._sizes.device()
            self._device = device.type
            self._clock.time_on(device)
            dtype = None if OPT_LEVELS[begun.opt_level].changes_nothing else str(begun.dtype).removeprefix("torch.")
            self._outbox.put(
                {
                    "event": "begin",
                    "level": name_of(begun),
                    "dtype": dtype,
                    "policy": str(begun),
                    "weights_type": "" if dtype else self._sizes.other_type(),
                    "maximized": self._sizes.maximized(),
                    "device": self._device,
                    "lost_eps": self._sizes.lost_eps(),
                }
            )
        if self._tells_modules:
            with_products = training.policy.product_format is not None  # keep_high affects only modules with products
            names = module_names(alive(training.models), with_products=with_products)
            self._outbox.put({"event": "modules", "names": names})
        if len(self._adopted) > 1:
            self._outbox.put({"event": "begin", "maximized": self._sizes.maximized()})
        if len(self._adopted) > 1 and training.policy != begun:
            self._note(f"initialize was called again, with another policy: {training.policy}")

    def _adopt_earlier(self, optimizer: Any) -> None:
        """Adopt the training of an optimizer that was initialized before the recording began."""
        if (training := training_of(optimizer)) is not None and training not in self._adopted:
            self._adopt(training)

    def _forward_begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or not self.is_recording():
            self.evaluated = True
            return
        self.forwards += 1
        if self.forwards == 1:
            self._note_start(args, kwargs)
        if self._clock.forward_begins(model):
            if self._weighed is not None:
                self._weighed.leave_out_inputs(args, kwargs)
            # Assigned, not added: an earlier forward whose samples no loss has claimed was no part of the step.
            sizes = sizes_of(args, kwargs)
            known = -len(sizes) <= self._batch_dim < len(sizes)
            self._clock.step.unclaimed_samples = sizes[self._batch_dim] if known else 0

    @eager_only
    def _note_start(self, args: Any, kwargs: Any) -> None:
        self._start = [*self._sizes.first_weights(), *sample(first_tensor(args, kwargs), 8)]

    def body_begins(self, body: Any) -> None:
        if not self.is_recording():
            return
        for optimizer in body.optimizers:
            self._adopt_earlier(optimizer)
        self._clock.body_begins()

    def loss_scaled(self, body: Any, loss: Tensor) -> None:
        if self.is_recording():
            # Without `forget`, a loss that a GradScaler has scaled too would count twice.
            if (samples := self._scaler_losses.forget(loss)) is not None:
                self._clock.step.unclaimed_samples = samples
            self._losses[id(body)] = single_value(loss)

    def body_ends(self, body: Any) -> None:
        loss = self._losses.pop(id(body), None)
        if not self.is_recording():
            return
        self._clock.body_ends()
        if loss is not None and not body.failed:
            self.losses += 1
            step = self._clock.step
            step.bodies.append(Body.of(body, loss, step.claim_samples()))
            if self.steps < 2:
                self._sizes.measure_gradients()

    def step_begins(self, optimizer: Any) -> None:
        if questions.policy_of(optimizer) is not None and self.is_recording():
            self._adopt_earlier(optimizer)
            self._clock.step_begins()

    def step_ends(self, optimizer: Any) -> None:
        if questions.has_stepped(optimizer) and self.is_recording() and self._stepped_by_scaler is not optimizer:
            self._end_step(optimizer)

    def loss_given_to_scaler(self, scaler: Any, loss: Tensor, scaled: Tensor, scale: Tensor) -> None:
        if self.is_recording() and scaled.requires_grad:
            self._clock.loss_given_to_scaler()
            self._scaler_losses.add(scaler, loss, scale, self._clock.step.claim_samples())

    def scaler_unscales(self, scaler: Any, optimizer: Any) -> None:
        if self.is_recording() and self._scaler_losses.has_some(scaler):
            self._clock.backward_ends()

    def scaler_steps(self, scaler: Any, optimizer: Any) -> None:
        optimizer = innermost(optimizer)
        losses = self._scaler_losses.take(scaler, optimizer)
        if self.is_recording() and self._records(optimizer):
            self._stepped_by_scaler = optimizer
            self.losses += len(losses)
            self._clock.step.bodies += losses
            self._clock.step_begins()

    def scaler_stepped(self, scaler: Any, optimizer: Any, skipped: Tensor | None) -> None:
        stepped, self._stepped_by_scaler = self._stepped_by_scaler, None
        if stepped is not None and skipped is not None and self.is_recording():
            self._end_step(stepped, skipped)

    def _records(self, optimizer: Any) -> bool:
        """Tell whether the steps of `optimizer`, which a GradScaler steps, are recorded.

        If no training went through `initialize`, they are. Otherwise only those of optimizers in such a training are.
        """
        is_trained = questions.policy_of(optimizer) is not None
        if is_trained:
            self._adopt_earlier(optimizer)
        elif not (self._adopted or self._device):
            device = next((p.device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))
            self._device = device.type
            self._clock.time_on(device)
            policy = "torch's own: a GradScaler"
            self._outbox.put({"event": "begin", "level": NATIVE, "policy": policy, "device": self._device})
        return is_trained or not self._adopted

    def _end_step(self, optimizer: Any, skipped: Tensor | None = None) -> None:
        self._clock.step_ends()
        if self.has_enough:  # the script has caught an earlier `Enough`
            self._clock.take_step()
            raise Enough(0)
        if self._lead is None or self._lead() is None or self._clock.step.others >= _OTHERS:
            self._lead = weakref.ref(optimizer)
        if self._lead() is not optimizer:
            self._clock.step.others += 1
            return
        self._finish_step(optimizer, skipped)
        self._clock.restart()
        if self.has_enough:
            self._end()  # now, because a script that catches `Enough` may train on until it is killed
            self._flush(wait=True)
            raise Enough(0)

    @property
    def is_in_a_step(self) -> bool:
        """Whether a forward of the training has begun since the last step."""
        return self._clock.step.forward_seen

    @property
    def has_enough(self) -> bool:
        """Whether as many steps have been recorded as `stop_after` asked for."""
        return self._stop_after is not None and self.steps >= self._stop_after

    def _finish_step(self, optimizer: Any, skipped: Tensor | float | None) -> None:
        step = self._clock.take_step()
        self.steps += 1
        if skipped is None:
            skipped = questions.last_skip(optimizer)
        weighed, self._weighed = self._weighed, None
        self._outbox.put_unread(step.unread_event(optimizer, skipped, weighed is not None))
        if weighed is not None:
            self._outbox.put(weighed.leave())
        for event in self._updates.step_ended(optimizer, self.steps):
            self._outbox.put_unread(event)
        if self.steps == self._measure_after:  # at the end of the recording the models may be freed
            self._measure_after *= 4
            self._sizes.measure()
        if self._outbox.is_due():
            self._flush()
        if self.steps == self._weigh_after:
            self._weighed = WeighedStep(self._sizes.at_rest(), self.steps)

    # Events for the sinks.

    @eager_only
    def log(self, scalars: dict[str, Any]) -> None:
        """Queue a "log" event for each figure of one call of `amp.log`."""
        for name, value in scalars.items():
            number = distributed.local(value.detach()).clone() if isinstance(value, Tensor) else float(value)
            event = {"event": "log", "step": self.steps, "name": name}
            self._outbox.put_unread(UnreadEvent([number], partial(_logged, event)))

    def _note(self, text: str) -> None:
        self._outbox.put({"event": "note", "text": text})

    @eager_only
    def _flush(self, wait: bool = False) -> None:
        self._outbox.flush(self.steps, wait)
        if self._clock.cuda is not None:
            self._peak.bank()  # a script that resets torch's peak each epoch would lose it


def _logged(event: Event, values: list[float]) -> Event:
    return {**event, "value": values[0]}

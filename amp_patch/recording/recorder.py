"""Record what happens in `initialize`, `scale_loss` and the optimizers' steps: losses, times, scales, skips, sizes.

While somebody records, and only then, the trainings have an observer, and the models a hook before their forward,
those that torch.compile has made too.
Nothing that is recorded makes a step wait for a device: numbers on a device are copied when the device gets there, and
read later.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_patch.recording.arrivals import Batch, Entry
from amp_patch.recording.inspected_step import Looking
from amp_patch.recording.peak_memory import PeakMemory
from amp_patch.recording.run import PARTS, Event, Run
from amp_patch.recording.sinks import Sink, sinks_for
from amp_patch.support import distributed, tree
from amp_patch.support.compiled import eager_only
from amp_patch.support.forward_hook import CompiledForward, ForwardHook, before_compiled
from amp_patch.support.patches import Installation, Patches
from amp_patch.training import observers, zero
from amp_patch.training import training as training_module
from amp_patch.training.observers import Observer
from amp_patch.training.scale_loss import ScaledBackward
from amp_patch.training.stash import Stash
from amp_patch.training.training import Training

# A recording is handed on this often, whichever comes first: by steps, by seconds.
_FLUSH_STEPS, _FLUSH_SECONDS = 50, 0.5

_OTHERS = 100  # so many steps of other optimizers in a row tell that the first one is done

_clock = time.perf_counter

_lock = threading.Lock()
_recorders: list[Recorder] = []
_of_compiled = Installation(of_process=True)  # for models that are compiled; in force while there are recorders
_watched: list[Any] = []  # Dynamo's module that is patched, as soon as there is one


class Enough(SystemExit):
    """The training has taken the steps that were asked for; to Python an exit without an error."""

    def __init__(self) -> None:
        super().__init__(0)


@contextmanager
def record(to: Any = None, *, inspect: bool = False) -> Iterator[Run]:
    """Record the training that runs in the block::

        with amp.record("curves.jsonl") as run:
            train(model, optimizer)
        print(run.loss[-1], run.peak_memory)

    What runs through `scale_loss` and `optimizer.step()` is recorded; `initialize` is called inside of the block or
    before it. There may be several recordings at once. No step waits for the device because of it. Figures arrive every
    half second or 50 steps, and when the block ends. Of the processes of a distributed job the first writes the file. A
    disk that is full ends the file, with a warning, and not the training.

    Args:
        to: a path, for one line of JSON an event; a TensorBoard SummaryWriter, or what else has
            `add_scalar(tag, value, step)`; None for the `Run` alone.
        inspect: also look, as `amp.inspect` does, at the step after 1, 10, 100, ... steps, whose times are then NaN.

    Yields:
        The `Run`, which fills.

    Raises:
        TypeError, OSError: `to` cannot be written to, from the beginning.
    """
    run = Run(level="")
    with Recorder([run, *sinks_for(to)], inspect=inspect):
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
        if _is_recording(recorder):
            recorder._log(scalars)


class Recorder(Observer):
    """Records the trainings of this process while its block runs, as events (see `Run.add`) to the sinks.

    A step ends when the first optimizer that ever stepped has stepped again; what others do until then (a GAN's) is in
    the same record. If others step a hundred times meanwhile, one of them takes its place. What the recorder itself
    does between two steps is in nobody's time. Where a compiled function hides the model's forward, its time is in
    "data".

    Args:
        sinks: each has `add(event)`; `flush` and `close`, where it has them, are called too.
        stop_after: leave the training after so many steps, by raising `Enough` out of `optimizer.step()`.
        inspect: emit a "look" of the step after 1, 10, 100, ... steps. The times of such a step are NaN.

    Attributes:
        trainings: how many calls of `initialize` were seen, those with `enabled=False` among them, and trainings that
            began before the recording.
        enabled: whether any of them was enabled.
        losses: how many bodies of `scale_loss` were seen.
        steps: how many steps were recorded.
    """

    def __init__(self, sinks: Sequence[Any], *, stop_after: int | None = None, inspect: bool = False) -> None:
        if stop_after is not None and (isinstance(stop_after, bool) or stop_after < 1):
            raise ValueError(f"Recorder: stop_after is {stop_after!r}; wanted a positive integer, or None")
        self.trainings = self.losses = self.steps = 0
        self.enabled = False
        self.process = os.getpid()
        self._sinks: list[Sink] = list(sinks)
        self._stop_after = stop_after
        self._inspect = inspect

    def __enter__(self) -> Recorder:
        self._adopted: list[Training] = []
        self._scalers: set[int] = set()  # ids of their lists of scalers, by which an optimizer's training is known
        self._handles: list[Any] = []
        self._hooked: list[weakref.ref[nn.Module]] = []
        # compiled -> which of those it is or has
        self._compiled = weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module] | None]()
        self._lead: weakref.ref[Any] | None = None
        self._device = ""
        self._cuda: torch.device | None = None  # on which the training is timed
        self._losses: dict[int, Tensor] = {}  # id of a body that runs -> a copy of its loss
        self._queue: list[Entry] = []
        self._travelling: list[Batch] = []
        self._flushed = time.monotonic()
        self._sizes = {"weights": 0, "masters": 0, "gradients": 0, "state": 0}
        self._measure_after = 1
        self._looking: Looking | None = None
        self._peak = PeakMemory()
        self._phase = _IDLE
        self._stepping = False
        self._open_bodies = 0
        self._step = _Step()
        self._last = self._now()
        for training in _trainings():
            self._hook(training)
        with _lock:
            _recorders.append(self)
        observers.add(self)
        return self

    def __exit__(self, *_: Any) -> None:
        observers.remove(self)
        with _lock:
            _recorders.remove(self)
            if not _recorders:
                _of_compiled.uninstall()
        for handle in self._handles:
            handle.remove()
        if os.getpid() != self.process:  # a fork has left the block too
            return
        try:
            if self._looking is not None:  # its step never ended
                self._looking.abandon()
                self._looking = None
            self._measure()
            self._put({"event": "end", **self._sizes, "peak_memory": self._peak.read(self._device or "cpu")})
            self._flush(wait=True)
        finally:
            self._each_sink("close")

    # What happens in the training.

    def training_begun(self, training: Training | None) -> None:
        if not _is_recording(self):
            return
        self.trainings += 1
        if training is not None:
            self._lead = None  # the earlier training may be over, and its optimizer still there
            self._hook(training)
            self._adopt(training)
            if not self.steps:
                self._last = self._now()  # what came before the training is none of it

    @eager_only
    def _adopt(self, training: Training) -> None:
        """Take this training for one that is recorded."""
        self.enabled = True
        self._adopted.append(training)
        self._scalers.add(id(training.scalers))
        begun = self._adopted[0].policy
        if len(self._adopted) == 1:
            device = next((param.device for param, _ in self._pairs()), torch.device("cpu"))
            self._device = device.type
            if device.type == "cuda":
                self._cuda = device
                self._last = self._now()
            dtype = None if begun.opt_level == "O0" else str(begun.dtype).removeprefix("torch.")
            self._put(
                {
                    "event": "begin",
                    "level": begun.opt_level,
                    "dtype": dtype,
                    "policy": str(begun),
                    "device": self._device,
                }
            )
        elif training.policy != begun:
            self._note(f"initialize was called again, with another policy: {training.policy}")

    def _hook(self, training: Training) -> None:
        _install_for_compiled()
        for model in _alive(training.models):
            if not self._is_hooked(model):
                self._hooked.append(weakref.ref(model))
                self._compiled.clear()
                self._handles.append(
                    model.register_forward_pre_hook(ForwardHook(self._forward_begins), with_kwargs=True)
                )
                _tell_of_compiled(model)

    def _is_hooked(self, model: nn.Module) -> bool:
        return any(ref() is model for ref in self._hooked)

    def _compiled_begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """A compiled model was called, be it one that is trained here or another."""
        if model not in self._compiled:
            # The model itself, or what it is in: DistributedDataParallel, or a module with the loss.
            self._compiled[model] = next((weakref.ref(m) for m in model.modules() if self._is_hooked(m)), None)
        ref = self._compiled[model]
        if ref is not None and (trained := ref()) is not None:
            self._forward_begins(trained, args, kwargs)

    def _know(self, stash: Stash) -> None:
        """Adopt the training of an optimizer that was initialized before the recording began."""
        if id(stash.scalers) not in self._scalers:
            for training in _trainings():
                if stash.scalers is training.scalers:
                    self.trainings += 1
                    self._adopt(training)

    def _forward_begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or not _is_recording(self):
            return  # an evaluation
        if self._phase is _IDLE:
            self._mark("optimizer" if self._stepping else "data")
            self._phase = "forward"
            self._step.forward_seen = True
            self._step.first = id(model)
        elif self._phase != "forward" or self._step.first != id(model):
            return  # in the one of another model, or recomputed in backward
        self._step.came = _samples(args, kwargs)  # of the newest forward: no body has followed an earlier one

    def body_begins(self, body: ScaledBackward) -> None:
        if not _is_recording(self):
            return
        for stash in body.stashes:
            self._know(stash)
        self._open_bodies += 1
        if self._open_bodies > 1:
            return
        seen = self._phase == "forward" or self._step.forward_seen
        self._mark("optimizer" if self._stepping and self._phase is _IDLE else "forward" if seen else "data")
        self._phase = "backward"

    def loss_scaled(self, body: ScaledBackward, loss: Tensor) -> None:
        if _is_recording(self):
            value = distributed.local(loss.detach())
            self._losses[id(body)] = value.clone() if value.numel() == 1 else value.double().mean()

    def body_ends(self, body: ScaledBackward) -> None:
        loss = self._losses.pop(id(body), None)
        if not _is_recording(self):
            return
        self._open_bodies = max(0, self._open_bodies - 1)
        if self._open_bodies == 0:
            self._mark("backward")
            self._phase = _IDLE
        if loss is not None and not body.failed:
            self.losses += 1
            self._step.bodies.append(_body(body, loss, self._step.came))
            self._step.came = 0
            if self.steps < 2:
                self._measure_gradients()

    def step_begins(self, optimizer: Any) -> None:
        stash = _recorded(optimizer)
        if stash is None or not _is_recording(self):
            return
        self._know(stash)
        if not self._stepping:  # else a subclass's step calls its parent's
            self._mark("between" if self._phase is _IDLE else self._phase)
            self._stepping = True

    def step_ends(self, optimizer: Any) -> None:
        stash = _recorded(optimizer)
        if stash is None or stash.step_depth or not _is_recording(self):  # a subclass's step has called its parent's
            return
        self._end_step(optimizer, stash)
        if self._has_enough():
            raise Enough

    def _end_step(self, optimizer: Any, stash: Stash) -> None:
        self._mark("optimizer")
        self._stepping = False
        self._phase = "backward" if self._open_bodies else _IDLE
        if self._has_enough():  # the script has caught it
            self._step = _Step()
            return
        if self._lead is None or self._lead() is None or self._step.others >= _OTHERS:
            self._lead = weakref.ref(optimizer)
        if self._lead() is not optimizer:
            self._step.others += 1
            return
        self._finish_step(optimizer, stash)
        self._last = self._now()

    def _has_enough(self) -> bool:
        return self._stop_after is not None and self.steps >= self._stop_after

    def _finish_step(self, optimizer: Any, stash: Stash) -> None:
        step, self._step = self._step, _Step()
        self.steps += 1
        # Of a step that skips on the device the verdict is the newest there; others leave none.
        skipped = stash.verdicts[-1].overflow if stash.verdicts else float(stash.last_skipped)
        inspected = self._looking is not None
        self._queue.append(_step_entry(step, optimizer, skipped, inspected))
        if self._looking is not None:
            self._leave_look()
        if self.steps == self._measure_after:  # the models may be gone when the recording ends
            self._measure_after *= 4
            self._measure()
        if len(self._queue) >= _FLUSH_STEPS or time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            self._flush()
        if self._inspect and not self._has_enough() and _is_power_of_ten(self.steps):
            self._look(optimizer, stash)

    # Looking.

    @eager_only
    def _look(self, optimizer: Any, stash: Stash) -> None:
        models = _alive(stash.models) or [m for training in self._adopted for m in _alive(training.models)]
        if not models:
            return
        self._peak.pause()
        try:
            self._looking = Looking(models[0], optimizer, self.steps)
        except (ValueError, RuntimeError) as error:
            self._note(str(error))

    @eager_only
    def _leave_look(self) -> None:
        assert self._looking is not None
        looking, self._looking = self._looking, None
        try:
            self._put(looking.leave())
        except (ValueError, RuntimeError) as error:
            self._note(f"inspect: {error}")
        self._peak.resume()

    # What goes to the sinks.

    @eager_only
    def _log(self, scalars: dict[str, Any]) -> None:
        for name, value in scalars.items():
            number = distributed.local(value.detach()).clone() if isinstance(value, Tensor) else float(value)
            event = {"event": "log", "step": self.steps, "name": name}
            self._queue.append(Entry([number], partial(_logged, event)))

    def _note(self, text: str) -> None:
        self._put({"event": "note", "text": text})

    def _put(self, event: Event) -> None:
        self._queue.append(Entry([], lambda _: event))

    @eager_only
    def _flush(self, wait: bool = False) -> None:
        """Send off what is queued, and hand on what has arrived of what was sent off before; all of it if `wait`."""
        self._flushed = time.monotonic()
        if self._queue:
            self._travelling.append(Batch(self._queue))
            self._queue = []
        while self._travelling and (wait or self._travelling[0].here()):
            for event in self._travelling.pop(0).read():
                self._each_sink("add", event)
        self._each_sink("flush")
        if self._cuda is not None:
            self._peak.bank()  # a script may reset torch's peak itself, once an epoch

    def _each_sink(self, name: str, *args: Any) -> None:
        """Call the method of all sinks that have it. One that cannot write ends, not the training."""
        for sink in list(self._sinks):
            try:
                if callable(method := getattr(sink, name, None)):
                    method(*args)
            except OSError as error:
                self._sinks.remove(sink)
                warnings.warn(f"record: the recording breaks off at step {self.steps}: {error}", stacklevel=2)

    # Times.

    def _now(self) -> Any:
        """This moment: for a training on CUDA when the device gets there."""
        if self._cuda is None:
            return _clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._cuda))
        return event

    def _mark(self, part: str) -> None:
        """What ran since the last mark was this part of the step."""
        now = self._now()
        self._step.spans.append((part, self._last, now))
        self._last = now

    # Sizes.

    def _optimizers(self) -> list[Any]:
        """Those of the recorded trainings that are still there, and in no later training."""
        return [
            optimizer
            for training in self._adopted
            for optimizer in _alive(training.optimizers)
            if getattr(getattr(optimizer, "_amp_stash", None), "scalers", None) is training.scalers
        ]

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """(param, master) of the models' parameters and the optimizers'; the same tensor twice where there is none."""
        optimizers = self._optimizers()
        pairs = [
            pair for optimizer in optimizers for pair in optimizer._amp_stash.masters.pairs(optimizer.param_groups)
        ]
        known = {id(param) for param, _ in pairs}
        models = [model for training in self._adopted for model in _alive(training.models)]
        return pairs + [(p, p) for model in models for p in model.parameters() if id(p) not in known]

    @eager_only
    def _measure_gradients(self) -> None:
        grads = [t.grad for t in {id(t): t for pair in self._pairs() for t in pair}.values() if t.grad is not None]
        self._sizes["gradients"] = max(self._sizes["gradients"], _bytes(grads))

    @eager_only
    def _measure(self) -> None:
        optimizers = self._optimizers()
        if not optimizers:
            return  # all gone, or restored: what was measured before holds
        pairs = self._pairs()
        states = [getattr(zero.stateful(optimizer), "state", None) or {} for optimizer in optimizers]
        self._sizes["weights"] = _bytes(param for param, _ in pairs)
        self._sizes["masters"] = _bytes(master for param, master in pairs if master is not param)
        self._sizes["state"] = _bytes(tensor for state in states for tensor in tree.tensors([*state.values()]))


_NAN = float("nan")

# What runs when no part of a step has been told: data is fetched, or gradients are clipped.
_IDLE = "idle"


class _Body(NamedTuple):
    """One body of `scale_loss`: its loss and scale (tensors of one element), and the samples that came before it.

    Attributes:
        key: of which loss it was: a GAN's two may have one loss_id.
        optimizers: their ids.
    """

    loss: Tensor
    scale: Tensor
    loss_id: int
    key: tuple[int, ...]
    optimizers: tuple[int, ...]
    samples: int


@dataclass
class _Step:
    """What was seen since the last step ended.

    Attributes:
        spans: (part, its start, its end).
        first: the id of the model whose forward that was, the outermost.
        came: how many samples the forward was given that no body has followed yet.
        others: how many steps other optimizers took.
    """

    spans: list[tuple[str, Any, Any]] = field(default_factory=list)
    bodies: list[_Body] = field(default_factory=list)
    forward_seen: bool = False
    first: int = 0
    came: int = 0
    others: int = 0


def _logged(event: Event, values: list[float]) -> Event:
    return {**event, "value": values[0]}


def _body(body: ScaledBackward, loss: Tensor, samples: int) -> _Body:
    optimizers = tuple(map(id, body.optimizers))
    key = (id(body.scaler), *sorted(optimizers))
    return _Body(loss, body.scale, body.scaler.loss_id, key, optimizers, samples)


def _step_entry(step: _Step, optimizer: Any, skipped: Tensor | float, inspected: bool) -> Entry:
    # What is done here is done in the middle of a training, with cold caches: all else is left to `make`.
    bodies = step.bodies
    values = [skipped, *(body.loss for body in bodies), *(body.scale for body in bodies)]
    return Entry(values, partial(_step_event, step, id(optimizer), inspected))


def _step_event(step: _Step, optimizer: int, inspected: bool, values: list[float]) -> Event:
    """The "step" event of the optimizer with this id; `values`: whether it skipped, the bodies' losses and scales."""
    bodies = step.bodies
    skipped, given, scales = values[0], values[1 : len(bodies) + 1], values[len(bodies) + 1 :]
    losses: dict[tuple[int, ...], list[float]] = {}  # of which loss -> those of its micro-batches
    samples: dict[tuple[int, ...], int] = {}
    for body, loss in zip(bodies, given, strict=True):
        losses.setdefault(body.key, []).append(loss)
        samples[body.key] = samples.get(body.key, 0) + body.samples
    own = [i for i, body in enumerate(bodies) if optimizer in body.optimizers] or range(len(bodies))
    first_id = min((bodies[i].loss_id for i in own), default=0)
    parts = dict.fromkeys(PARTS, _NAN if inspected else 0.0)
    for part, start, end in step.spans:
        parts[part] += _seconds(start, end)
    return {
        "event": "step",
        "loss": sum(sum(each) / len(each) for each in losses.values()) if losses else _NAN,
        "seconds": sum(parts.values()),
        "parts": parts,
        "scale": next((scales[i] for i in reversed(own) if bodies[i].loss_id == first_id), _NAN),
        "skipped": bool(skipped),
        "samples": max(samples.values(), default=step.came),  # several losses (a GAN's) are of the same samples
    }


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _install_for_compiled() -> None:
    """Have compiled models tell too. Whoever has made an optimizer has imported what is needed of Dynamo."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None or dynamo in _watched:
        return
    optimized, compile = dynamo.OptimizedModule, nn.Module.compile

    @functools.wraps(compile)
    def compile_and_tell(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        compile(self, *args, **kwargs)
        _tell_of_compiled(self)

    def replace(patches: Patches) -> None:
        patches.set(optimized, "__call__", before_compiled(optimized.__call__, _compiled_begins))
        patches.set(nn.Module, "compile", compile_and_tell)
        patches.apply(lambda: _watched.append(dynamo), _watched.clear)

    _of_compiled.add(replace)


def _tell_of_compiled(model: nn.Module) -> None:
    """Have the model tell of its forwards if `model.compile()` was called; until the last recording ends."""
    compiled = model._compiled_call_impl
    if compiled is None or isinstance(compiled, CompiledForward):
        return
    ref = weakref.ref(model)

    def undo() -> None:
        model = ref()
        if model is not None and isinstance(found := model._compiled_call_impl, CompiledForward):
            model._compiled_call_impl = found.compiled

    ours = CompiledForward(model, compiled, _compiled_begins)
    # Not by `patches.set`, which would hold the model until then.
    _of_compiled.add(lambda patches: patches.apply(lambda: setattr(model, "_compiled_call_impl", ours), undo))


def _compiled_begins(model: nn.Module, args: Any, kwargs: Any) -> None:
    for recorder in tuple(_recorders):
        if _is_recording(recorder):
            recorder._compiled_begins(model, args, kwargs)


def _is_recording(recorder: Recorder) -> bool:
    """Whether this is the process that records: a fork inherits its parent's recorders too."""
    capturing = recorder._cuda is not None and torch.cuda.is_current_stream_capturing()
    return recorder.process == os.getpid() and not capturing


def _recorded(optimizer: Any) -> Stash | None:
    """The stash of an optimizer whose training is enabled."""
    stash: Stash | None = getattr(optimizer, "_amp_stash", None)
    if stash is None or not stash.enabled or stash.owner is None or stash.owner() is not optimizer:
        return None
    return stash


def _trainings() -> list[Training]:
    return training_module.trainings


def _alive(refs: Any) -> list[Any]:
    return [value for ref in refs if (value := ref()) is not None]


def _samples(args: Any, kwargs: Any) -> int:
    """The first dimension of the first tensor; 0 where that is not known."""
    try:
        tensor = args[0] if args and isinstance(args[0], Tensor) else next(iter(tree.tensors((args, kwargs))), None)
        return tensor.size(0) if tensor is not None and tensor.dim() else 0
    except RuntimeError:  # a container that holds itself, or a tensor without sizes
        return 0


def _bytes(tensors: Any) -> int:
    """What the tensors take, each once; of a sharded one this process's part."""
    total = 0
    for tensor in {id(t): t for t in tensors}.values():
        local = distributed.local(tensor)
        parts = (local._values(), local._indices()) if local.is_sparse else (local,)
        total += sum(part.numel() * part.element_size() for part in parts)
    return total


def _is_power_of_ten(number: int) -> bool:
    return str(number).strip("0") == "1"

"""One step of a recording: the observations while it runs, and the "step" event made of them."""

from __future__ import annotations

import math
import struct
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_patch.diagnose.recording.outbox import UnreadEvent
from amp_patch.diagnose.recording.run import LOW_TYPES, PARTS, Event
from amp_patch.support import distributed, tree
from amp_patch.support.devices import widest

_NAN = float("nan")


class Body(NamedTuple):
    """One body of `scale_loss`, or one loss that a GradScaler has scaled.

    Attributes:
        loss, scale: tensors of one element: a copy of the unscaled loss, and the loss scale.
        key: identifies the loss of the body: micro-batches of one loss have one key. It includes the optimizers, since
            a GAN's two losses may have one loss_id.
        optimizers: the ids of the optimizers that were passed to `scale_loss`.
        samples: the number of samples in the batch of the forward before the body; 0 if unknown.
    """

    loss: Tensor
    scale: Tensor
    loss_id: int
    key: tuple[int, ...]
    optimizers: tuple[int, ...]
    samples: int

    @classmethod
    def of(cls, body: Any, loss: Tensor, samples: int) -> Body:
        """Make the record of a `scale_loss` that has ended.

        `loss` is a copy of its unscaled loss, `samples` the number of samples in the batch of the forward before it.
        """
        optimizers = tuple(map(id, body.optimizers))
        key = (id(body.scaler), *sorted(optimizers))
        return cls(loss, body.scale, body.scaler.loss_id, key, optimizers, samples)


class ScalerLosses:
    """The losses that each GradScaler has scaled since it last stepped an optimizer."""

    def __init__(self) -> None:
        # id of a scaler -> (the loss itself, its record) of each loss
        self._of_scaler: dict[int, list[tuple[weakref.ref[Tensor], Body]]] = {}

    def add(self, scaler: Any, loss: Tensor, scale: Tensor, samples: int) -> None:
        """Store a copy of `loss`, the unscaled loss that was given to `scaler.scale`, with `scale` and `samples`.

        `samples` is the number of samples in the batch of the forward before it.
        """
        found = Body(single_value(loss), scale, 0, (id(scaler),), (), samples)
        self._of_scaler.setdefault(id(scaler), []).append((weakref.ref(loss), found))

    def has_some(self, scaler: Any) -> bool:
        """Tell whether the scaler has scaled a loss since it last stepped an optimizer."""
        return bool(self._of_scaler.get(id(scaler)))

    def forget(self, loss: Tensor) -> int | None:
        """Drop the record of this loss, and return its number of samples; None if no scaler has scaled it."""
        samples = None
        for losses in self._of_scaler.values():
            for found in [each for each in losses if each[0]() is loss]:
                losses.remove(found)
                samples = found[1].samples
        return samples

    def take(self, scaler: Any, optimizer: Any) -> list[Body]:
        """Remove and return the losses that the scaler has scaled since it last stepped an optimizer.

        They are as if `scale_loss` had scaled them for this `optimizer`.
        """
        key = id(scaler), id(optimizer)
        return [each._replace(key=key, optimizers=key[1:]) for _, each in self._of_scaler.pop(id(scaler), [])]


@dataclass
class Step:
    """Observations since the last step ended.

    Attributes:
        spans: (name of a part of the step, one of `PARTS`; its start; its end). Start and end are seconds, or CUDA
            events.
        cpu_seconds: the CPU time of the process in these parts, summed over its threads.
        bodies: bodies of `scale_loss` that ended without an exception.
        forward_seen: whether a model's forward began.
        first: the id of the model whose forward began the newest "forward" part. Forwards of other models in that part,
            for example inside of it, are not forwards of the step.
        unclaimed_samples: the number of samples in the newest forward's batch, until `claim_samples` gives it to a
            loss; then 0.
        others: how many steps were taken by optimizers other than the lead (see `Recorder`).
    """

    spans: list[tuple[str, Any, Any]] = field(default_factory=list)
    cpu_seconds: float = 0.0
    bodies: list[Body] = field(default_factory=list)
    forward_seen: bool = False
    first: int = 0
    unclaimed_samples: int = 0
    others: int = 0

    def claim_samples(self) -> int:
        """Return the number of samples in the newest forward's batch, for the loss that follows it, and set it to 0.

        A second loss after the same forward therefore gets 0, and the samples count once.
        """
        samples, self.unclaimed_samples = self.unclaimed_samples, 0
        return samples

    def unread_event(self, optimizer: Any, skipped: Tensor | float, weighed: bool) -> UnreadEvent:
        """Make the "step" event of the step that `optimizer` ends.

        `skipped` is 1 if the optimizer skipped it, else 0: a number, or a tensor if only the device knows. A `weighed`
        step gets NaN as times.
        """
        # The training waits for this call, so it only collects tensors. `_event` computes the rest later.
        bodies = self.bodies
        values = [skipped, *(body.loss for body in bodies), *(body.scale for body in bodies)]
        return UnreadEvent(values, partial(self._event, id(optimizer), weighed))

    def _event(self, optimizer: int, weighed: bool, values: list[float]) -> Event:
        """Make the "step" event, after `values` were read: the skip flag, then the bodies' losses, then their scales.

        `optimizer` is the id of the optimizer that ended the step.
        """
        bodies = self.bodies
        skipped, given, scales = values[0], values[1 : len(bodies) + 1], values[len(bodies) + 1 :]
        losses: dict[tuple[int, ...], list[float]] = {}  # key of a loss -> the values of its micro-batches
        samples: dict[tuple[int, ...], int] = {}
        for body, loss in zip(bodies, given, strict=True):
            losses.setdefault(body.key, []).append(loss)
            samples[body.key] = samples.get(body.key, 0) + body.samples
        own = [i for i, body in enumerate(bodies) if optimizer in body.optimizers] or range(len(bodies))
        first_id = min((bodies[i].loss_id for i in own), default=0)
        parts = dict.fromkeys(PARTS, _NAN if weighed else 0.0)
        for part, start, end in self.spans:
            parts[part] += _seconds(start, end)
        return {
            "event": "step",
            "objectives": len({key[1:] for key in losses}) or 1,
            "loss_types": [name for name in LOW_TYPES if all(_is_exact(loss, name) for loss in given)],
            "loss": sum(sum(each) / len(each) for each in losses.values()) if losses else _NAN,
            "seconds": sum(parts.values()),
            "cpu_seconds": _NAN if weighed else self.cpu_seconds,
            "parts": parts,
            "scale": next((scales[i] for i in reversed(own) if bodies[i].loss_id == first_id), _NAN),
            "skipped": bool(skipped),
            # Several losses (a GAN's) come from the same samples.
            "samples": max(samples.values(), default=self.unclaimed_samples),
        }


def _is_exact(loss: float, dtype: str) -> bool:
    """Tell whether `dtype` ("float16", "bfloat16") represents the loss exactly; infinities and NaNs count as exact."""
    if not math.isfinite(loss):
        return True
    try:
        if dtype == "float16":
            return bool(struct.unpack("<e", struct.pack("<e", loss))[0] == loss)
        single = struct.pack("<f", loss)
    except OverflowError:
        return False
    return single[:2] == b"\0\0" and bool(struct.unpack("<f", single)[0] == loss)


def single_value(loss: Tensor) -> Tensor:
    """Return a detached copy of the loss as a tensor of one element: the mean, in type `widest`, if it has several."""
    value = distributed.local(loss.detach())
    return value.clone() if value.numel() == 1 else value.to(widest(value.device)).mean()


def sizes_of(args: Any, kwargs: Any) -> list[int]:
    """Return the shape of the first tensor among a forward's arguments; [] if it is not known."""
    tensor = first_tensor(args, kwargs)
    if tensor is None:
        return []
    try:
        return [tensor.size(0)] if tensor.is_nested else list(tensor.shape)  # a nested tensor has no other size
    except RuntimeError:  # a tensor without sizes
        return []


def first_tensor(args: Any, kwargs: Any) -> Tensor | None:
    """Return the first tensor among a forward's arguments; None if there is none, or it is not known."""
    try:
        return args[0] if args and isinstance(args[0], Tensor) else next(iter(tree.tensors((args, kwargs))), None)
    except RuntimeError:  # a container that holds itself
        return None


def sample(tensor: Tensor | None, count: int) -> list[Tensor | float]:
    """Return copies of up to `count` evenly spaced elements of a tensor, on its device.

    The list is empty if there is no tensor, or if it is a subclass or has no real numbers in memory of its own.
    """
    if tensor is None or type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return []
    is_functorchs = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    if is_functorchs or tensor.is_meta or tensor.is_nested or tensor.is_complex():
        return []
    elements = tensor.detach().flatten()[:: max(1, tensor.numel() // count)][:count]
    return [*elements.clone().unbind()]


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3

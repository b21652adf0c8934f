"""Masters in the host's memory under weights on a device: copies of gradients down and of weights up, in low precision.

For each such parameter the host has a *twin*: its low-precision value. Kernels, portions, `settle` and `publish` take
the twin in place of the weight, so that they run on the host alone. This file keeps both alike: `send` copies twins to
their weights, `fetch_edits` copies weights that user code has written to their twins.

Copies to the host are queued, and `arrive` waits for all of them at once. On CUDA the host's side is pinned, and the
copies run on a stream of their own; the device's later work waits for weights on the device, not on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from amp_patch import supported
from amp_patch.support import device_sync
from amp_patch.support.blocks import without_grad
from amp_patch.support.devices import by_device

used = False  # whether any master of this process was on another device than its weight; if not, callers skip this file


def is_apart(param: Tensor, master: Tensor) -> bool:
    """Tell whether gradients and weights are copied between the parameter and its new master."""
    return param.device != master.device


class _Copies:
    """The copies between one device and the host, which run in order.

    Attributes:
        sent, arrived: the number of copies that were queued, and of those that the host has waited for.
    """

    def __init__(self, device: torch.device) -> None:
        _all.append(self)
        self.device, self.sent, self.arrived = device, 0, 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def queue(self) -> Any:
        """Return a context manager whose copies run after the work that the device has queued so far.

        Raises RuntimeError in a capture of a CUDA graph, whose replays would not make the host wait.
        """
        if device_sync.is_capturing():
            why = supported.reason("offload", "CUDA graphs")
            raise RuntimeError(f"scale_loss: a CUDA graph is being captured, and master_device='cpu': {why}")
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._stream)

    def down(self, value: Tensor, to: Tensor) -> Tensor:
        """Queue a copy of `value` into `to`, on the host; return `to`."""
        with self.queue():
            to.copy_(value, non_blocking=True)
        self.sent += 1  # after the copy: a thread that waits now must not miss it
        if self._stream is not None:
            value.record_stream(self._stream)
        return to

    def precede(self) -> None:
        """Let the device's later work wait for the copies; the host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def arrive(self) -> None:
        if self.arrived < (sent := self.sent):
            (torch.get_device_module(self.device) if self._stream is None else self._stream).synchronize()
            self.arrived = max(self.arrived, sent)  # last: other threads must not read before the wait is over


_all: list[_Copies] = []
_of = functools.cache(_Copies)  # the one of a device


def arrive() -> None:
    """Wait for all copies under way."""
    for copies in _all:
        copies.arrive()


def arrive_freed(grads: Any) -> None:
    """Wait if any of `grads` is a copy on the host, of a gradient that the device has freed."""
    if any(grad.device.type == "cpu" for grad in grads):
        arrive()


def _like(value: Tensor) -> Tensor:
    """Return memory of the host for a copy of `value`, pinned if that is on CUDA."""
    with torch.inference_mode(False):  # else no later write outside of that mode would be allowed
        return torch.empty_like(value, device="cpu", pin_memory=value.is_cuda, requires_grad=False)


def number(value: Tensor) -> Tensor:
    """Queue a copy of a small tensor to the host, and return it."""
    return value if value.device.type == "cpu" else _of(value.device).down(value, _like(value))


class OnHost:
    """The transport of one parameter whose master is on the host (`Record.host`).

    Attributes:
        frees: whether a gradient leaves the device as soon as it is complete (`gradient_release=True`).
        hook: the handle of the hook of backward that calls `take_early`.
    """

    __slots__ = ("_alias", "_early", "_given", "_known", "_layout", "_memory", "_sent", "_twin", "frees", "hook")

    def __init__(self) -> None:
        global used
        used = True
        self.frees = False
        self.hook: Any = None
        self._twin: Tensor | None = None
        self._layout: Any = None  # of the weight, when the twin was made; the twin of a weight with gaps has none
        self._alias: Tensor | None = None  # `.data` of the weight, whose version counts writes through `.data`
        self._known: Any = None  # what tells a written weight, when twin and weight were alike
        self._sent = 0  # `_Copies.sent` when the twin was last copied to the device
        self._memory: Tensor | None = None  # of gradients
        self._given: Any = type(None)  # returns the gradient in `_memory`, or None if nothing holds it
        self._early: tuple[Any, int, Tensor] | None = None  # (gradient, or nothing if it is freed, its version, copy)

    # Weights ----------------------------------------------------------------------------------------------------------

    def twin(self, param: Tensor) -> Tensor:
        """Return the twin of `param`, to be written; waits for a copy of it under way."""
        layout = param.dtype, param.shape, param.stride()
        if self._twin is None or self._layout != layout:
            self._twin, self._known, self._layout = _like(param), None, layout
        elif self._sent > _of(param.device).arrived:
            arrive()
        return self._twin

    def is_written(self, param: Tensor) -> bool:
        """Tell whether user code has written `param` since twin and weight were alike."""
        return self._known is None or self._known != self._mark(param)

    def note_written(self) -> None:
        """Note that user code has written the weight."""
        self._known = None

    def save(self, param: Tensor, sent: int = 0) -> None:
        """Note that twin and weight are alike, or will be: `sent` is `_Copies.sent` when the twin was sent."""
        self._known, self._sent = self._mark(param), sent

    def _mark(self, param: Tensor) -> Any:
        version = 0 if param.is_inference() else param._version
        return version, param.data_ptr(), param.device, 0 if self._alias is None else self._alias._version

    def data(self, data: Tensor) -> Tensor:
        """Return `data`, the `.data` of the weight, as a tensor whose writes are counted here."""
        if self._alias is None or not self._alias.is_set_to(data):
            if self._alias is not None and self._alias._version:
                self._known = None  # it may have been written since `save`
            self._alias = data
        return self._alias.detach()

    # Gradients --------------------------------------------------------------------------------------------------------

    def queue(self, grad: Tensor) -> Tensor:
        """Queue a copy of `grad` to the host; return the copy, which `arrive` completes."""
        memory = self._memory
        alike = memory is not None and memory.dtype is grad.dtype and memory.stride() == grad.stride()
        if memory is None or not alike or memory.shape != grad.shape or self._given() is not None:
            memory = self._memory = _like(grad)
        result = memory.detach()
        self._given = TensorWeakRef(result)
        return _of(grad.device).down(grad, result)

    @without_grad
    def take_early(self, grad: Tensor) -> bool:
        """Queue a copy of a complete gradient during backward; tell whether the device may free the gradient."""
        if grad.layout is not torch.strided or grad.requires_grad:
            return False
        if (freed := self.freed()) is not None:  # a second part of it
            arrive()
            grad.add_(freed.to(grad.device))
            del freed
        self._early = None
        self._early = (type(None) if self.frees else TensorWeakRef(grad)), grad._version, self.queue(grad)
        return self.frees

    def freed(self) -> Tensor | None:
        """Return the copy of the gradient that the device has freed in this body; None if there is none."""
        return self._early[2] if self._early is not None and self._early[0] is type(None) else None

    def give_back(self, param: Tensor) -> Tensor | None:
        """Return a gradient that the device has freed in this body, on the device again; None if there is none."""
        if (freed := self.freed()) is None:
            return None
        arrive()
        return torch.empty_like(freed, device=param.device).copy_(freed)

    def found(self, grad: Tensor | None) -> Tensor | None:
        """Return `grad`, the parameter's gradient; if there is none, the copy of one that the device has freed."""
        return self.freed() if grad is None else grad

    def forget(self, *, freed: bool = False) -> None:
        """Forget the early copy, because its gradient may be written now; with `freed`, also of a freed gradient."""
        if freed or self.freed() is None:
            self._early = None

    def fetch(self, grad: Tensor) -> Tensor:
        """Return the copy of `grad`, a result of `found`; it is queued now unless backward has queued it."""
        early, self._early = self._early, None
        if early is not None and (early[2] is grad or (early[0]() is grad and grad._version == early[1])):
            return early[2]
        return self.queue(grad) if grad.layout is torch.strided else grad.to("cpu")


# ----------------------------------------------------------------------------------------------------------------------
# Weights of many records


def twins(params: Sequence[Tensor], records: Sequence[Any]) -> list[Tensor]:
    """Return the twin of each parameter whose master is on the host, and all other parameters."""
    return [p if r.host is None else r.host.twin(p) for p, r in zip(params, records, strict=True)]


@without_grad
def fetch_edits(params: Sequence[Tensor], records: Sequence[Any]) -> set[Any]:
    """Copy the weights that user code has written to their twins; return their records. Waits if there are any."""
    pairs = zip(params, records, strict=True)
    written = [(p, record) for p, record in pairs if record.host is not None and record.host.is_written(p)]
    for param, record in written:
        _of(param.device).down(param.detach(), record.host.twin(param))
        record.host.save(param)
    if written:
        arrive()
    return {record for _, record in written}


@without_grad
def send(params: Sequence[Tensor], records: Sequence[Any]) -> None:
    """Copy twins to their weights. The device's later work waits for this, the host does not."""
    on_devices: Any = [pair for pair in zip(params, records, strict=True) if pair[1].host is not None]
    groups: Any = by_device(on_devices)
    for device, (some, theirs) in groups.items():
        copies, from_twins = _of(device), twins(some, theirs)
        with copies.queue():
            for param, twin in zip(some, from_twins, strict=True):
                param.copy_(twin, non_blocking=True)
        copies.sent += 1
        copies.precede()
        for param, record in zip(some, theirs, strict=True):
            weight = record.param()  # `param` may be its `.data`
            record.host.save(param if weight is None else weight, copies.sent)

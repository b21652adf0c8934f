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
from amp_patch.masters.grad_field import own_grad, set_own_grad
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
        refuse_capture("scale_loss")
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self._stream)

    def down(self, value: Tensor, to: Tensor) -> None:
        """Queue a copy of `value` into `to`, on the host."""
        with self.queue():
            to.copy_(value, non_blocking=True)
        self.sent += 1  # after the copy: a thread that waits now must not miss it
        if self._stream is not None:
            value.record_stream(self._stream)

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


def _like(value: Tensor) -> Tensor:
    """Return memory of the host for a copy of `value`, pinned if that is on CUDA.

    Masters and optimizer state are not pinned: no step copies them, and torch rounds each pinned block up to a power of
    two, which would take up to twice their memory from the host.
    """
    with torch.inference_mode(False):  # else no later write outside of that mode would be allowed
        return torch.empty_like(value, device="cpu", pin_memory=value.is_cuda, requires_grad=False)


def copied(value: Tensor) -> Tensor:
    """Queue a copy of `value` to the host; return the copy, which `arrive` completes."""
    _of(value.device).down(value, result := _like(value))
    return result


def number(value: Any) -> Any:
    """Return a number on the host: `value`, or a copy that `arrive` completes if it is a tensor on a device."""
    return copied(value) if isinstance(value, Tensor) and value.device.type != "cpu" else value


def refuse_capture(where: str) -> None:
    """Raise RuntimeError in the capture of a CUDA graph, for the function `where` of masters on the host."""
    if device_sync.is_capturing():
        why = supported.reason("offload", "CUDA graphs")
        raise RuntimeError(f"{where}: a CUDA graph is being captured, and master_device='cpu': {why}")


def gradient(param: Tensor, record: Any) -> Tensor | None:
    """Return the gradient of `param`; if it has none, the copy of one that the device has freed."""
    grad = own_grad(param)
    return record.host.freed if grad is None and record.host is not None else grad


class OnHost:
    """The transport of one parameter whose master is on the host (`Record.host`).

    Attributes:
        freed: the copy of a gradient that the device has freed in this body (`gradient_release=True`).
    """

    __slots__ = ("_alias", "_early", "_known", "_sent", "_twin", "freed")

    def __init__(self) -> None:
        global used
        used = True
        self.freed: Tensor | None = None
        self._twin: Tensor | None = None
        self._alias: Tensor | None = None  # `.data` of the weight, whose version counts writes through `.data`
        self._known: Any = None  # what tells a written weight, when twin and weight were alike
        self._sent = 0  # `_Copies.sent` when the twin was last copied to the device
        self._early: Any = None  # (the gradient that backward has queued, its version, its copy)

    # Weights ----------------------------------------------------------------------------------------------------------

    def twin(self, param: Tensor) -> Tensor:
        """Return the twin of `param`, to be written; waits for a copy of it under way."""
        if self._twin is None or self._twin.dtype is not param.dtype or self._twin.shape != param.shape:
            self._twin, self._known = _like(param), None
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

    @without_grad
    def take_early(self, grad: Tensor, frees: bool) -> bool:
        """Queue a copy of a complete gradient during backward; tell whether the device may free the gradient.

        Args:
            frees: whether gradients leave the device (`gradient_release=True`).
        """
        if grad.layout is not torch.strided or grad.requires_grad or self._queued(grad) is not None:
            return False
        if self.freed is not None:  # a second part of it
            arrive()
            grad.add_(self.freed.to(grad.device))
        copy = copied(grad)
        self.freed, self._early = (copy, None) if frees else (None, (TensorWeakRef(grad), grad._version, copy))
        return frees

    def _queued(self, grad: Tensor) -> Tensor | None:
        """Return the copy of `grad` that backward has queued; None if there is none, or `grad` was written since."""
        is_it = self._early is not None and self._early[0]() is grad and self._early[1] == grad._version
        return self._early[2] if is_it else None

    def give_back(self, param: Tensor) -> None:
        """Forget the copies, since user code may write the gradient; one that was freed is on the device again."""
        freed, self.freed, self._early = self.freed, None, None
        if freed is not None:
            arrive()
            set_own_grad(param, torch.empty_like(freed, device=param.device).copy_(freed))

    def forget(self) -> None:
        """Forget the copies of the gradient."""
        self.freed = self._early = None

    def fetch(self, grad: Tensor) -> Tensor:
        """Return the copy of `grad`, a result of `gradient`; it is queued now unless backward has queued it."""
        copy = grad if grad is self.freed else self._queued(grad)
        self.forget()
        if copy is not None:
            return copy
        return copied(grad) if grad.layout is torch.strided else grad.to("cpu")


# ----------------------------------------------------------------------------------------------------------------------
# Weights of many records


def twins(params: Sequence[Tensor], records: Sequence[Any]) -> list[Tensor]:
    """Return the twin of each parameter whose master is on the host, and all other parameters."""
    return [p if r.host is None else r.host.twin(p) for p, r in zip(params, records, strict=True)]


@without_grad
def edited(links: Any) -> Any:
    """Return `links` with the twins in place of weights, without the weights that user code has not written.

    Twins get the values of written weights; waits if there are any.
    """
    written = [(p, record) for p, record in links if record.host is not None and record.host.is_written(p)]
    for param, record in written:
        _of(param.device).down(param.detach(), record.host.twin(param))
        record.host.save(param)
    if written:
        arrive()
    others = [pair for pair in links if pair[1].host is None]
    return type(links)([(record.host.twin(param), record) for param, record in written] + others)


@without_grad
def send(params: Sequence[Tensor], records: Sequence[Any]) -> None:
    """Copy twins to their weights. The device's later work waits for this, the host does not."""
    rows: Any = [(p, r.host.twin(p), r) for p, r in zip(params, records, strict=True) if r.host is not None]
    groups: Any = by_device(rows)
    for device, (some, from_twins, theirs) in groups.items():
        copies = _of(device)
        with copies.queue():
            for param, twin in zip(some, from_twins, strict=True):
                param.copy_(twin, non_blocking=True)
        copies.sent += 1
        copies.precede()
        for param, record in zip(some, theirs, strict=True):
            weight = record.param()  # `param` may be its `.data`
            record.host.save(param if weight is None else weight, copies.sent)

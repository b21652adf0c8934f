"""Upcasts of large low-precision tensors: a loss of the FP32 copy may save, and differentiate, what it was made of."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from amp_patch.casts.state import is_plain_eager
from amp_patch.casts.thread_state import this_thread
from amp_patch.policy import LOW_PRECISION
from amp_patch.support.patches import Patches

SMALLEST = 2**22  # elements; for smaller logits the blocks take up to 1.6 times as long as copies, which a cache holds


Wides = tuple[weakref.ref[Tensor], ...]


class Source(NamedTuple):
    """What an FP32 tensor was made of.

    Attributes:
        graph: the low-precision tensor, or without memory a tensor at its place in the graph.
        is_alive: whether `graph` is the tensor itself, which other code holds, so that saving it costs nothing.
        wides: references to the FP32 tensors between `graph` and the loss.
    """

    graph: Tensor
    is_alive: bool
    wides: Wides


class _Note(NamedTuple):
    wide: weakref.ref[Tensor]
    low: weakref.ref[Tensor]
    versions: tuple[int, int]
    place: Tensor | None


_notes: dict[int, _Note] = {}  # id of an FP32 tensor -> its note, as long as the tensor lives


class _Place(torch.autograd.Function):
    """A tensor like `low`, with its place in the graph and one element of memory: it outlives `low` at no cost."""

    @staticmethod
    def forward(ctx: Any, low: Tensor) -> Tensor:
        return low.new_empty(()).expand(low.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def install(patches: Patches) -> None:
    """Note upcasts by `Tensor.float` and `Tensor.to`, until `patches` are removed. Compiled code does not see it."""
    patches.on_remove(partial(_stopped.discard, True))
    for name in () if _stopped else NOTING:
        patches.apply(partial(_replace, name), partial(_restore, name))


def stop() -> None:
    """Note no upcasts until the installation is removed.

    For trainings with modules that stay FP32: Dynamo traces no cast of a `KeptResult` if another function has replaced
    `Tensor.to`.
    """
    _stopped.add(True)
    for name in NOTING:
        _restore(name)


def _replace(name: str) -> None:
    _originals[name] = getattr(Tensor, name)
    setattr(Tensor, name, NOTING[name])


def _restore(name: str) -> None:
    if vars(Tensor).get(name) is NOTING[name]:
        delattr(Tensor, name)
        if getattr(Tensor, name) is not _originals[name]:  # Tensor inherits its own ones
            setattr(Tensor, name, _originals[name])


def _noting(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(Tensor, name))
    def cast(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        wide = _originals[name](self, *args, **kwargs)
        is_low = type(self) is Tensor and self.dtype in LOW_PRECISION and self.requires_grad
        if is_low and self.numel() >= SMALLEST and _is_upcast(wide):
            _note(self, wide)
        return wide

    return cast


_stopped: set[bool] = set()  # not empty after `stop`
_originals: dict[str, Callable[..., Any]] = {}
NOTING = {name: _noting(name) for name in ("float", "to")}


def _is_upcast(wide: Tensor) -> bool:
    return wide.dtype is torch.float32 and wide.requires_grad and not is_dynamo_compiling() and is_plain_eager()


def _note(low: Tensor, wide: Tensor) -> None:
    key = id(wide)

    def forget(gone: Any) -> None:
        if (found := _notes.get(key)) is not None and found.wide is gone:
            del _notes[key]

    # Inside of a model `low` lives at least as long as the call of a loss there. The output of a model may be freed.
    place = None if this_thread.stack else _Place.apply(low)
    _notes[key] = _Note(weakref.ref(wide, forget), weakref.ref(low), (low._version, wide._version), place)


def source_of(wide: Tensor) -> Source | None:
    """Return what `wide`, or the tensor of which it is a view in another shape, was made of.

    None if it was not noted, or if user code has written one of the tensors, or hooked the FP32 one.
    """
    base = wide if wide._base is None else wide._base
    note = _notes.get(id(base))
    if (
        note is None
        or note.wide() is not base
        or base._version != note.versions[1]
        or any(map(_is_hooked, (base, wide)))
    ):
        return None
    low = note.low()
    graph = note.place if low is None else low
    if graph is None or (low is not None and low._version != note.versions[0]):
        return None
    if wide is not base:
        node = wide.grad_fn
        whole = wide.numel() == base.numel() and all(
            x.is_contiguous() for x in (wide, base, base if low is None else low)
        )
        if not whole or node is None or node.next_functions[0][0] is not base.grad_fn:
            return None  # not one view of all elements in their order: others between may have hooks
        graph = graph.view(wide.shape)
    return Source(graph, low is not None, (weakref.ref(base), weakref.ref(wide)))


def _is_hooked(tensor: Tensor | None) -> bool:
    return tensor is not None and (bool(tensor._backward_hooks) or tensor.retains_grad)  # noqa: SLF001


def goes_to_upcast(wides: Wides, probe: Any) -> bool:
    """Tell whether backward has to pass the FP32 tensor: it has hooks now, or single gradients are asked for.

    Args:
        wides: as in `Source`.
        probe: the node of a leaf that no code asks for. In a whole backward the engine visits it.
    """
    hooked = any(_is_hooked(wide()) for wide in wides)
    return hooked or not torch._C._will_engine_execute_node(probe)  # noqa: SLF001

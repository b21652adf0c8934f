"""Outputs of models that their exit casts to FP32: a loss of such a copy differentiates what it was made of."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from amp_patch.casts.state import is_plain_eager
from amp_patch.policy import LOW_PRECISION

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
    place: Tensor


_notes: dict[int, _Note] = {}  # id of an FP32 tensor -> its note, as long as the tensor lives


class _Place(torch.autograd.Function):
    """A tensor like `low`, with its place in the graph and one element of memory: it outlives `low` at no cost."""

    @staticmethod
    def forward(ctx: Any, low: Tensor) -> Tensor:
        return low.new_empty(()).expand(low.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def note(low: Tensor, wide: Tensor) -> None:
    """Note that a model's exit has cast `low` to `wide`, if a loss of `wide` can go by it."""
    if is_dynamo_compiling() or low.dtype not in LOW_PRECISION or low.numel() < SMALLEST or type(low) is not Tensor:
        return
    if not (wide.dtype is torch.float32 and wide.requires_grad and is_plain_eager()):
        return
    key = id(wide)

    def forget(gone: Any) -> None:
        if (found := _notes.get(key)) is not None and found.wide is gone:
            del _notes[key]

    _notes[key] = _Note(weakref.ref(wide, forget), weakref.ref(low), (low._version, wide._version), _Place.apply(low))


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
    if low is not None and low._version != note.versions[0]:
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

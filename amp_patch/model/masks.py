"""Additive attention masks among a cast model's inputs: their casts saturate, so that no finite number becomes -inf."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.model.joints import Call, Entry, FirstCalls
from amp_patch.support.tree import map_tensors

_MASKED = -1e8  # a number up to this belongs to an additive mask


class Masks(FirstCalls):
    """Casts the masks among a model's inputs; `stays` if a check of the first inputs (watch/) has found one.

    Attributes:
        found: by method, positions and names of arguments that were additive masks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, set[int | str]] = {}

    def enter(self, call: Call) -> None:
        """Cast the masks; their finite numbers stay finite."""
        super().enter(call)
        if found := self.found.get(call.kind[0]):
            call.args, call.kwargs = _saturated(call.args, call.kwargs, found, call.state.policy.cast_model_type)


def choose(model: nn.Module, entry: Entry) -> Masks | None:
    """Return a guest if the training casts inputs."""
    return None if entry.policy.cast_model_type is None else Masks()


def note(call: Call, keys: Iterable[int | str]) -> None:
    """Take an argument of `call`, with this position and name, for a mask, in this call and in later ones."""
    for guest in call.state.guests.all:
        if isinstance(guest, Masks):
            guest.found.setdefault(call.kind[0], set()).update(keys)
            call.state.guests.stay(guest)


def is_mask(x: Tensor, low: torch.dtype) -> bool:
    """Tell whether `x` is an additive mask with finite numbers that become infinite in `low`. Syncs.

    `x` is a mask if all such numbers are at most -1e8 (a mask of -1e9 may be added to position biases), or if they are
    all negative and every other finite number of `x` is 0.
    """
    return belong_to_mask(*lost_and_rest(x, low))


def belong_to_mask(lost: Tensor, rest: Tensor) -> bool:
    """Tell whether `lost`, numbers that become infinite, belong to a mask whose other finite numbers are `rest`."""
    if not lost.numel():
        return False
    highest = lost.max().item()
    return highest <= _MASKED or (highest < 0 and not bool(rest.any()))


def lost_and_rest(x: Tensor, low: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split the finite numbers of `x` in two 1-D tensors: those that become infinite in `low`, and all others."""
    finite, infinite = x.isfinite(), x.to(low).isinf()
    return x[finite & infinite], x[finite & ~infinite]


def _saturated(
    args: tuple[Any, ...], kwargs: dict[str, Any], masks: set[int | str], low: torch.dtype
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return (args, kwargs) of a call, where the floating tensors of masks are cast to `low` by `saturate`.

    Args:
        masks: the positions and names of the arguments that are masks.
    """

    def one(x: Tensor) -> Tensor:
        return saturate(x, low) if x.is_floating_point() and x.dtype is not low else x

    return (
        tuple([map_tensors(one, value) if key in masks else value for key, value in enumerate(args)]),
        {key: map_tensors(one, value) if key in masks else value for key, value in kwargs.items()},
    )


def saturate(x: Tensor, low: torch.dtype) -> Tensor:
    """Return `x` cast to `low`; a finite number below the range of `low` becomes its lowest number instead of -inf."""
    cast = x.to(low)
    return cast.masked_fill(cast.isneginf() & ~x.isneginf(), torch.finfo(low).min)

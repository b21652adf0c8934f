"""The meter of lost updates: which share of the changes that steps make to FP32 weights would change no low one.

An update is lost where the weight in the low-precision type, with the change added and rounded to nearest again, is the
same weight: all smaller than half the distance between two numbers there. What is measured is what a training without
masters (O3) would lose at each step; it needs FP32 values, the weights' own or masters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from amp_patch.masters.closed_master import drop_joined, form_of, is_closed
from amp_patch.policy import LOW_PRECISION
from amp_patch.support import distributed
from amp_patch.training.stash import Stash, stash_of

_SAMPLE = 2**12  # elements of a parameter: of more than twice as many about so many are looked at, evenly spaced


@dataclass
class Updates:
    """What steps changed, and what of that low precision would have lost.

    Attributes:
        dtype: the low-precision type, "bfloat16" or "float16".
        counts: name of a parameter -> how many of its elements that were looked at the steps changed, and how many of
            these changes would be lost.
        step: how many optimizer steps there had been before, of the first.
    """

    dtype: str = "bfloat16"
    counts: dict[str, list[int]] = field(default_factory=dict)
    step: int = 0

    def lost(self, module: str = "") -> float | None:
        """The share that is lost, of all, of a module's or of one parameter's by name; None where nothing changed."""
        return share_lost([self], module)


def share_lost(several: Iterable[Updates], module: str = "", dtype: str | None = None) -> float | None:
    """`Updates.lost` over several of them, or over those of one low-precision type."""
    found = [
        count
        for each in several
        if dtype in (None, each.dtype)
        for name, count in each.counts.items()
        if not module or name == module or name.startswith(f"{module}.")
    ]
    changed = sum(count[0] for count in found)
    return sum(count[1] for count in found) / changed if changed else None


class UpdateMeter:
    """The values of an optimizer's FP32 weights, or a sample of each, to be compared with those after a step.

    Args:
        names: of parameters by their ids; one without has the name that `initialize` knows, or its place in the groups.

    Attributes:
        dtype: the low-precision type: the training's, and where it has none bfloat16.
        dtypes: all that can be counted in: one, or both where the training has none.
    """

    def __init__(self, optimizer: Any, names: Mapping[int, str] = MappingProxyType({})) -> None:
        stash = stash_of(optimizer)
        self.dtype = torch.bfloat16
        self.dtypes: tuple[torch.dtype, ...] = LOW_PRECISION
        if stash is not None and stash.enabled and stash.policy.makes_low_tensors:
            self.dtype = stash.policy.dtype
            self.dtypes = (self.dtype,)
        self._optimizer, self._names = optimizer, names
        self._before = dict(self._values())

    def counts(self) -> dict[str, Tensor]:
        """By the name of a parameter two numbers, on its device: as in `Updates.counts`; no sync."""
        return self.counts_in((self.dtype,))[self.dtype]

    def counts_in(self, dtypes: Sequence[torch.dtype]) -> dict[torch.dtype, dict[str, Tensor]]:
        """`counts` in several low-precision types."""
        found: dict[torch.dtype, dict[str, Tensor]] = {dtype: {} for dtype in dtypes}
        for name, value in self._values():
            for dtype in dtypes if name in self._before else ():
                found[dtype][name] = _count(self._before[name], value, dtype)
        return found

    @torch.no_grad()
    def _values(self) -> Iterator[tuple[str, Tensor]]:
        """Samples of the FP32 values of weights that are, or would be, of low precision."""
        stash = stash_of(self._optimizer)
        for name, param, master in _named(self._optimizer, stash, self._names):
            if master.dtype is not torch.float32 or master.layout is not torch.strided:
                continue
            form = form_of(master)
            if form is not None and not form.is_exact:
                continue  # a BF16 weight alone
            casts = stash is not None and stash.enabled and stash.policy.cast_model_type is not None
            if casts and param is master and not distributed.is_dtensor(param):
                continue  # a batch norm's, say: it is FP32 at each level
            was_closed = is_closed(master) and not master.is_open  # type: ignore[attr-defined]
            yield name, _sample(distributed.local(master.detach()))
            if was_closed:
                drop_joined([master])  # one after the other, so that the masters are never all open


def _named(optimizer: Any, stash: Stash | None, given: Mapping[int, str]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, parameter, master) of an optimizer's parameters; the parameter twice where it has no master."""
    known = {} if stash is None or not stash.enabled else stash.masters.by_master
    names = {} if stash is None else stash.neighbours.names
    for index, group in enumerate(optimizer.param_groups):
        for position, master in enumerate(group["params"]):
            param = known[id(master)][0] if id(master) in known else master
            yield given.get(id(param)) or names.get(id(param), f"group {index}, parameter {position}"), param, master


def _sample(value: Tensor) -> Tensor:
    # An odd distance: an even one might go along one column of a matrix.
    return value.flatten()[:: max(1, value.numel() // _SAMPLE) | 1].clone()


@torch.no_grad()
def _count(before: Tensor, after: Tensor, dtype: torch.dtype) -> Tensor:
    """How many elements have changed, and how many of these changes a weight of `dtype` would lose."""
    if before.shape != after.shape or before.device != after.device:
        return torch.zeros(2, dtype=torch.int64, device=after.device)
    change, low = after - before, before.to(dtype)
    changed = (change != 0) & change.isfinite()
    lost = changed & ((low.float() + change).to(dtype) == low)
    return torch.stack([changed.sum(), lost.sum()])

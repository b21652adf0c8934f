"""Warns when somebody averages low-precision weights: blends a cast model's weights into a copy of it.

Such an average hardly moves. A copy that is made equal to the model, loaded, pruned or trained is no average. To tell
them apart a few weights of the copy are compared between two steps, while the model's stay the same: an average moves
from what it was after the first step towards the model's weights, and stays between the two.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.masters.masters import link_of
from amp_patch.policy import LOW_PRECISION
from amp_patch.support.scripts_line import stacklevel

_STEPS = 500  # a copy is watched for so many steps
_TENSORS, _ELEMENTS = 4, 64  # and this much of it is looked at
_EVERY = 50  # one step in so many is looked at on other devices than a CPU, because the host must wait for them


class CopyWatch:
    """Watches one copy of a model, from its making on. It keeps neither the copy nor the model alive."""

    def __init__(self, copied: nn.Module) -> None:
        self._copied = weakref.ref(copied)
        self._pairs: list[tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] | None = None
        self._before: tuple[list[int], int, Tensor] | None = None  # versions, loads, values
        self._left = _STEPS
        self._found = 0

    def remember(self, model: nn.Module) -> bool:
        """Note what the copy is after a step of `model`. Returns whether to go on watching."""
        copied = self._copied()
        if copied is None or self._left == 0:
            return False
        if self._pairs is None:
            both = zip(copied.parameters(), model.parameters(), strict=False)
            alike = [(c, p) for c, p in both if c.dtype in LOW_PRECISION and c.dtype is p.dtype and c.shape == p.shape]
            self._pairs = [(weakref.ref(c), weakref.ref(p)) for c, p in alike[-_TENSORS:]]
        tensors = self._tensors()
        if not tensors:
            return False
        self._left -= 1
        copies = [c for c, _ in tensors]
        if copies[0].device.type == "cpu" or self._left % _EVERY == 0:
            self._before = ([c._version for c in copies], _loads(copied), _values(copies))
        return True

    def compare(self, level: str) -> None:
        """Compare before the next step. Warns when the copy was blended with the model a second time.

        Syncs with the device, but few steps are looked at elsewhere than on a CPU.
        """
        copied, tensors = self._copied(), self._tensors()
        if copied is None or self._before is None or not tensors:
            return
        (versions, loads, before), self._before = self._before, None
        copies = [c for c, _ in tensors]
        moved = versions != [c._version for c in copies]
        if loads != _loads(copied):
            return
        now, source = _values(copies), _values([p for _, p in tensors])
        if (not moved and torch.equal(now, before)) or torch.equal(now, source):
            return
        slack = 2 * torch.finfo(copies[0].dtype).eps * torch.maximum(before.abs(), source.abs())
        low, high = torch.minimum(before, source) - slack, torch.maximum(before, source) + slack
        if not bool(((low <= now) & (now <= high)).all()):
            return
        self._found += 1
        if self._found == 2:
            self._left = 0
            warnings.warn(
                f"a copy of this {type(copied).__name__} ({level}) is averaged with its {copies[0].dtype} weights, in "
                "which most of an average's small steps are lost; average the FP32 ones: make the copy by "
                "amp.fp32_copy(model) and blend in the values of model.state_dict(), as examples/recipes/average.py",
                stacklevel=stacklevel(),
            )

    def _tensors(self) -> list[tuple[Tensor, Tensor]]:
        pairs = [
            (c, p) for first, second in self._pairs or () if (c := first()) is not None if (p := second()) is not None
        ]
        # A copy with a master is trained, or averaged through its state dict, which is FP32.
        return [] if any(link_of(c) is not None or c.device != p.device for c, p in pairs) else pairs


def remember(models: Iterable[weakref.ref[nn.Module]]) -> None:
    """Note, after a step that trained `models`, what their copies are."""
    for model, state in _with_copies(models):
        state.copies[:] = [watch for watch in state.copies if watch.remember(model)]


def compare(models: Iterable[weakref.ref[nn.Module]]) -> None:
    """Look, before a step that trains `models`, whether a copy was averaged since the last one."""
    for _, state in _with_copies(models):
        for watch in state.copies:
            watch.compare(state.policy.opt_level)


def _with_copies(models: Iterable[weakref.ref[nn.Module]]) -> list[tuple[nn.Module, Any]]:
    alive = [model for ref in models if (model := ref()) is not None]
    return [(m, state) for m in alive if (state := vars(m).get("_amp")) is not None and state.copies]


def _loads(copied: nn.Module) -> int:
    return getattr(vars(copied).get("_amp"), "loads", 0)


@torch.no_grad()
def _values(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1)[:_ELEMENTS].float() for tensor in tensors])

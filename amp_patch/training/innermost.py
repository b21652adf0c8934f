"""Finds the optimizer inside wrappers such as LARC and SAM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

# Names under which a wrapper has its optimizer: LARC has the second, SAM the third, torch's _NamedOptimizer the fourth.
_NAMES = ("optim", "optimizer", "base_optimizer", "_optimizer")


def innermost(optimizer: object) -> Any:
    """Return the optimizer inside wrappers, stored under one of `_NAMES`."""
    if "_amp_stash" in getattr(optimizer, "__dict__", ()):  # only innermost optimizers have a stash
        return optimizer
    *_, last = layers(optimizer)
    return last


def layers(optimizer: object) -> Iterator[Any]:
    """Yield `optimizer`, then the optimizer that it wraps, and so on, down to the innermost optimizer."""
    seen: set[int] = set()
    while id(optimizer) not in seen:
        seen.add(id(optimizer))
        yield optimizer
        inner = next((found for name in _NAMES if (found := getattr(optimizer, name, None))), None)
        if inner is None or isinstance(inner, type) or not callable(getattr(inner, "step", None)):
            break
        # Some wrappers are torch Optimizers themselves, because schedulers require one. Any of four signs identifies a
        # wrapper: its class has the attribute `wraps_an_optimizer` (LARC); it makes two passes (SAM); it has no stash
        # but the inner optimizer has one, because it was made after `initialize` (Accelerate); it has no hooks, because
        # it did not call Optimizer's __init__ (Lookahead).
        wraps = getattr(type(optimizer), "wraps_an_optimizer", False) or makes_two_passes(optimizer)
        later = hasattr(inner, "_amp_stash") and not hasattr(optimizer, "_amp_stash")
        hooked = hasattr(optimizer, "_optimizer_step_pre_hooks")
        if isinstance(optimizer, torch.optim.Optimizer) and hooked and not (wraps or later):
            break
        optimizer = inner


def makes_two_passes(wrapper: Any) -> bool:
    """Tell whether `wrapper` moves the weights between two backward passes of one step, as SAM does."""
    base = getattr(wrapper, "base_optimizer", None)
    return callable(getattr(base, "step", None)) and not isinstance(base, type)


def as_list(one_or_many: Any) -> list[Any]:
    """Return an argument as a list: one object becomes a list of one, a tuple a list, and None an empty list."""
    if one_or_many is None:
        return []
    return list(one_or_many) if isinstance(one_or_many, list | tuple) else [one_or_many]

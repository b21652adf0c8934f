"""The optimizer that steps inside of wrappers, as LARC and SAM are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def innermost(optimizer: Any) -> Any:
    """The optimizer inside of wrappers that keep it as `.optim` or `.optimizer` (LARC), or `.base_optimizer` (SAM)."""
    if "_amp_stash" in getattr(optimizer, "__dict__", ()):  # `initialize` has found this one to be the innermost
        return optimizer
    *_, last = layers(optimizer)
    return last


def layers(optimizer: Any) -> Iterator[Any]:
    """`optimizer`, what it wraps, what that wraps, down to the optimizer that steps."""
    seen: set[int] = set()
    while id(optimizer) not in seen:
        seen.add(id(optimizer))
        yield optimizer
        inner = next(
            (i for name in ("optim", "optimizer", "base_optimizer") if (i := getattr(optimizer, name, None))), None
        )
        if inner is None or isinstance(inner, type) or not callable(getattr(inner, "step", None)):
            break
        # Some wrappers are Optimizers too, for the sake of schedulers. These are told from an optimizer that steps by
        # any of four signs: their class says so (LARC); they were put around an optimizer of ours after `initialize`
        # (Accelerate); they make two passes (SAM); they have no hooks, as they never called Optimizer's __init__
        # (Lookahead).
        wraps = getattr(type(optimizer), "wraps_an_optimizer", False) or makes_two_passes(optimizer)
        later = hasattr(inner, "_amp_stash") and not hasattr(optimizer, "_amp_stash")
        hooked = hasattr(optimizer, "_optimizer_step_pre_hooks")
        if isinstance(optimizer, torch.optim.Optimizer) and hooked and not (wraps or later):
            break
        optimizer = inner


def makes_two_passes(wrapper: Any) -> bool:
    """Whether `wrapper` moves the weights after one backward pass, for the gradients of another, as SAM does."""
    base = getattr(wrapper, "base_optimizer", None)
    return callable(getattr(base, "step", None)) and not isinstance(base, type)


def as_list(one_or_many: Any) -> list[Any]:
    """A list of what may be one object, a list or tuple of them, or None."""
    if one_or_many is None:
        return []
    return list(one_or_many) if isinstance(one_or_many, list | tuple) else [one_or_many]

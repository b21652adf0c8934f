"""Wrappers around an optimizer, as LARC and SAM are: which optimizer steps inside; two passes before one step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from amp_patch.masters.masters import publish_written
from amp_patch.support import generated_class
from amp_patch.support.generated_class import Generated, base_class
from amp_patch.training.stash import known_stash, stash_of
from amp_patch.training.unscale import unscale_pending

# ----------------------------------------------------------------------------------------------------------------------
# Which optimizer steps


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


# ----------------------------------------------------------------------------------------------------------------------
# Two passes


class AmpWrapper(Generated):
    """Overrides of a wrapper that makes two passes around an optimizer that went through `initialize`."""

    @classmethod
    def _amp_overrides(cls, base: type, key: tuple[str, ...]) -> dict[str, Any]:
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            refuse_closure(self, (self, *args), kwargs)
            return base.step(self, *args, **kwargs)  # type: ignore[attr-defined]

        def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
            base.zero_grad(self, *args, **kwargs)  # type: ignore[attr-defined]
            innermost(self).zero_grad(*args, **kwargs)  # clears the gradients of low-precision parameters too

        def first_step(self: Any, *args: Any, **kwargs: Any) -> Any:
            unscale_pending(innermost(self))
            result = base.first_step(self, *args, **kwargs)  # type: ignore[attr-defined]
            # A compiled forward, or one of a part of the model, would not publish the masters.
            publish_written(known_stash(innermost(self)).masters.links)
            return result

        def second_step(self: Any, *args: Any, **kwargs: Any) -> Any:
            unscale_pending(innermost(self))  # the wrapper's step moves back only masters that have a gradient
            return base.second_step(self, *args, **kwargs)  # type: ignore[attr-defined]

        # A scheduler may have captured the step of a wrapper that is an Optimizer: that one gets a hook.
        hooked = issubclass(base, torch.optim.Optimizer)
        made = [zero_grad, first_step, second_step] if hooked else [step, zero_grad, first_step, second_step]
        return {method.__name__: method for method in made if hasattr(base, method.__name__)}


def enter_wrappers(optimizer: Any) -> None:
    """Tell the innermost optimizer of the wrappers around it, and give those with two passes a class; idempotent.

    `optimizer` may be any, wrapped or not, in a training or not.
    """
    *wrappers, target = layers(optimizer)
    stash = stash_of(target)
    if stash is None or not stash.enabled:
        return
    if stash.policy.changes_nothing:
        return
    stash.wrapped = stash.wrapped or bool(wrappers)
    for wrapper in filter(makes_two_passes, wrappers):
        stash.two_passes = True
        if isinstance(wrapper, AmpWrapper):
            continue
        stash.masters.follow(wrapper)
        generated_class.give(wrapper, AmpWrapper)
        stash.neighbours.wrappers.append(weakref.ref(wrapper))
        if isinstance(wrapper, torch.optim.Optimizer):
            stash.neighbours.handles.append(wrapper.register_step_pre_hook(refuse_closure))


def refuse_closure(wrapper: Any, args: Any, kwargs: Any) -> None:
    """Pre-hook of a wrapper's `step`: its closure would run backward without the scale, and unchecked."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    stash = stash_of(innermost(wrapper))
    if closure is not None and stash is not None and stash.checks_gradients:
        name = base_class(wrapper).__name__
        raise RuntimeError(
            f"{name}.step: a closure computes the gradients of the second pass inside step(); under loss scaling, and "
            "with skip_nonfinite=True, make the two passes yourself, each with its own scale_loss: backward, "
            f"{name}.first_step(zero_grad=True), backward again, {name}.second_step(zero_grad=True) "
            "(examples/recipes/sam.py)"
        )

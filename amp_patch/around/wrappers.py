"""Wrappers around an optimizer that make two passes before one step, as SAM does."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch

from amp_patch.masters.masters import publish_written
from amp_patch.masters.of_optimizer import Masters
from amp_patch.masters.states import find_by_masters, find_by_params
from amp_patch.support import generated_class
from amp_patch.support.generated_class import Generated, base_class
from amp_patch.training.innermost import innermost, layers, makes_two_passes
from amp_patch.training.stash import known_stash, stash_of
from amp_patch.training.unscale import unscale_pending


class AmpWrapper(Generated):
    """Overrides of a two-pass wrapper (SAM): its passes get unscaled gradients, and moved masters reach the weights."""

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
            # A compiled forward, or a forward of a submodule, would not copy the masters back.
            publish_written(known_stash(innermost(self)).masters.links)
            return result

        def second_step(self: Any, *args: Any, **kwargs: Any) -> Any:
            unscale_pending(innermost(self))  # `second_step` moves back only masters that have a gradient
            return base.second_step(self, *args, **kwargs)  # type: ignore[attr-defined]

        def __setstate__(self: Any, state: dict[str, Any]) -> None:
            base.__setstate__(self, state)  # type: ignore[attr-defined]
            find_by_params(self)

        # An Optimizer gets a step hook instead of an override, because a scheduler may have stored its `step`.
        hooked = issubclass(base, torch.optim.Optimizer)
        made = [zero_grad, first_step, second_step, __setstate__ if hooked else step]
        return {method.__name__: method for method in made if hasattr(base, method.__name__)}


def enter_wrappers(optimizer: Any) -> None:
    """Notify the innermost optimizer of its wrappers, and give two-pass wrappers a generated class; idempotent.

    `optimizer` may be wrapped or not, and in a training or not.
    """
    *wrappers, target = layers(optimizer)
    stash = stash_of(target)
    if stash is None or not stash.enabled:
        return
    if stash.policy.changes_nothing:
        return
    stash.passes = max(stash.passes, int(bool(wrappers)))
    for wrapper in filter(makes_two_passes, wrappers):
        stash.passes = 2
        if isinstance(wrapper, AmpWrapper):
            continue
        stash.masters.follow(wrapper)
        find_by_params(wrapper, shared=True)
        generated_class.give(wrapper, AmpWrapper)
        stash.neighbours.undo.append(partial(_leave, weakref.ref(wrapper), stash.masters))
        if isinstance(wrapper, torch.optim.Optimizer):
            stash.neighbours.undo.append(wrapper.register_step_pre_hook(refuse_closure).remove)


def _leave(ref: weakref.ref[Any], masters: Masters) -> None:
    """Undo `enter_wrappers`: restore the wrapper's class; key its state by the model's parameters again."""
    if isinstance(wrapper := ref(), Generated):
        masters.unfollow(wrapper)
        find_by_masters(wrapper)
        generated_class.take(wrapper)


def refuse_closure(wrapper: Any, args: Any, kwargs: Any) -> None:
    """Raise if a wrapper's `step` gets a closure, whose backward would be unscaled and unchecked (a step pre-hook)."""
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

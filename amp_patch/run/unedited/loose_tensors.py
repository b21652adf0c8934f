"""Trained tensors outside of any model: SAC's temperature, the coefficient of a PDE, the image of an attack."""

from __future__ import annotations

import gc
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn

from amp_patch.policy import LOW_PRECISION
from amp_patch.run.unedited.refusal import ScriptRefused
from amp_patch.support.reach import Reach
from amp_patch.training.innermost import innermost
from amp_patch.training.scale_loss import loss_scale


class LooseTensors(nn.Module):
    """An empty model for the training of an optimizer that holds tensors of no module: it has nothing to cast."""


def steps_loose_tensors(optimizer: Any) -> bool:
    """Return whether no module with a forward owns a tensor of `optimizer`.

    If a module with a forward owns one, the call of that module begins the level. A module without a forward, for
    example an agent that holds its networks and a temperature, is never called, and is ignored here. The search visits
    all objects of the process, so call this only at an optimizer's first backward.
    """
    own = {id(param) for group in innermost(optimizer).param_groups for param in group["params"]}
    for found in gc.get_objects():
        if not issubclass(type(found), nn.Module):  # not isinstance: a proxy object would run its own code
            continue
        # A scripted class has no `forward`. A module that another thread is constructing may have no `_parameters` yet.
        with suppress(AttributeError):
            if type(found).forward is nn.Module.forward and "forward" not in vars(found):
                continue
        with suppress(AttributeError):
            if not own.isdisjoint(map(id, found.parameters())):
                return False
    return True


@contextmanager
def unscaled(reach: Reach, held: Container[int], models: list[nn.Module], optimizers: list[Any]) -> Iterator[None]:
    """Unscale the gradients that the backward in the body adds to leaves outside of all models and optimizers.

    `scale_loss` unscales only the parameters of its optimizers. Without this, the image of an adversarial attack would
    receive a gradient that is too large by the scale.

    Args:
        reach: the leaves that the backward reaches.
        held: ids of the parameters that optimizers hold.
        models: the models that are trained at a level.
        optimizers: the optimizers of the running `scale_loss`.
    """
    others = [leaf for key, leaf in reach.leaves.items() if key not in held]
    if others:  # this is rare, so the slow walk over all parameters of the models is too
        known = {id(p) for model in models for p in model.parameters()}
        others = [leaf for leaf in others if id(leaf) not in known]
    earlier = [leaf.grad for leaf in others]
    scale = loss_scale(optimizers) if others else None
    for leaf in others:
        leaf.grad = None
    yield
    for leaf, before in zip(others, earlier, strict=True):
        grad: Tensor | None = leaf.grad
        if grad is not None and scale is not None:
            grad = grad / scale.to(grad.device, grad.dtype)
        leaf.grad = grad if before is None else before if grad is None else before + grad


def reaches_low_weights(reach: Reach) -> bool:
    """Return whether a backward that reaches no parameter of an optimizer reaches low-precision weights."""
    return any(isinstance(leaf, nn.Parameter) and leaf.dtype in LOW_PRECISION for leaf in reach.leaves.values())


def untrained(name: str, *, loose: bool, low: bool) -> ScriptRefused:
    """Return the refusal of an optimizer, of class `name`, whose parameters were in no model when the level began.

    Args:
        loose: whether its tensors belong to no module.
        low: whether low-precision weights got gradients that no optimizer takes: the script has masters of its own.
    """
    if low:
        return ScriptRefused(
            f"it has mixed precision of its own: the {name} here holds masters of FP16 or BF16 weights",
            lines="",
            then="Turn that off by the script's own option (such as --fp16 or --use_fp16), so that a level replaces it",
        )
    return ScriptRefused(
        f"the {name} here holds tensors of no module that was called since it was made, with gradients enabled",
        "and put tensors that belong to no module into one that is called, as nn.Parameter" if loose else "",
    )

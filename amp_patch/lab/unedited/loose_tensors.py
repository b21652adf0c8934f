"""Tensors that belong to no model: SAC's temperature, the coefficient of a PDE, the image of an adversarial attack."""

from __future__ import annotations

import gc
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn

from amp_patch.lab.unedited.reach import Reach
from amp_patch.training.innermost import innermost
from amp_patch.training.scale_loss import loss_scale
from amp_patch.training.stash import stash_of


class LooseTensors(nn.Module):
    """The model of a training whose optimizer steps tensors of no module: there is nothing in it to cast."""


def steps_loose_tensors(optimizer: Any) -> bool:
    """Whether the tensors of `optimizer` belong to no module that has a forward, whose call would begin a level.

    An agent that holds its networks beside such a tensor is a module without a forward. Looks at all objects of the
    process: for an optimizer's first backward alone.
    """
    own = {id(param) for group in innermost(optimizer).param_groups for param in group["params"]}
    for found in gc.get_objects():
        if not issubclass(type(found), nn.Module):  # not isinstance: a proxy would answer that
            continue
        if type(found).forward is nn.Module.forward and "forward" not in vars(found):
            continue
        with suppress(AttributeError):  # a module that another thread makes has no parameters yet
            if not own.isdisjoint(map(id, found.parameters())):
                return False
    return True


@contextmanager
def unscaled(reach: Reach, held: Container[int], models: list[nn.Module], optimizers: list[Any]) -> Iterator[None]:
    """Let the leaves that belong to no model and no optimizer have their gradients as without a scale.

    Args:
        held: ids of the parameters that optimizers hold.
        models: those that are trained at a level.
        optimizers: of the `scale_loss` that runs.
    """
    others = [leaf for key, leaf in reach.leaves.items() if key not in held]
    if others:  # nearly never: the walk over all parameters of the models takes a while
        known = {id(p) for model in models for p in model.parameters()}
        others = [leaf for leaf in others if id(leaf) not in known]
    earlier = [leaf.grad for leaf in others]
    scale = loss_scale(optimizers) if others else None
    for leaf in others:
        leaf.grad = None
    yield
    for leaf, before in zip(others, earlier, strict=True):
        grad: Tensor | None = leaf.grad
        if grad is not None and scale is not None and _scales(optimizers):
            grad = grad / scale.to(grad.device, grad.dtype)
        leaf.grad = grad if before is None else before if grad is None else before + grad


def _scales(optimizers: list[Any]) -> bool:
    return any((stash := stash_of(innermost(o))) is not None and stash.scales_loss for o in optimizers)

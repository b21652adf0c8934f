"""Scaled gradients of the model become unscaled ones of the masters; overflow is recorded on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from amp_patch.masters.gradients import Earlier, gather, held
from amp_patch.multi_tensor import inverse_of
from amp_patch.support import distributed
from amp_patch.training.innermost_optimizer import innermost
from amp_patch.training.loss_scaler import LossScaler
from amp_patch.training.stash import Stash, distinct_pairs, drop_spent, known_stash, sharing, siblings, stash_of


def first_gradient(optimizer: Any) -> Tensor | None:
    """The first gradient that the optimizer would step with, or the parameter's where a master has none yet."""
    stash = stash_of(innermost(optimizer))
    for group in innermost(optimizer).param_groups:
        pairs = [(p, p) for p in group["params"]] if stash is None else stash.masters.pairs([group])
        for param, master in pairs:
            grad = param.grad if master.grad is None else master.grad
            if grad is not None:
                return grad
    return None


def unscale(optimizers: Sequence[Any], scaler: LossScaler, inverse: Tensor | None) -> None:
    """Turn scaled gradients of the model into unscaled ones of the masters; record overflow on the device; no sync.

    An exception in here drops all these gradients: some may be unscaled by then, and an overflow not noted.

    Args:
        optimizers: whose gradients; a parameter that several of them hold is unscaled once.
        scaler: of the loss.
        inverse: 1 / scale, FP32, shape []; None where the loss was not multiplied: then nothing is checked.
    """
    pairs = distinct_pairs(optimizers)
    try:
        _unscale(optimizers, pairs, scaler, inverse)
    except BaseException:
        drop(pairs)
        for optimizer in optimizers:
            stash = known_stash(optimizer)
            stash.pending, stash.backward.earlier = None, {}
        raise


def drop(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Drop the gradients of parameters and masters."""
    for param, master in pairs:
        param.grad = master.grad = None


def _unscale(
    optimizers: Sequence[Any], pairs: list[tuple[Tensor, Tensor]], scaler: LossScaler, inverse: Tensor | None
) -> None:
    stashes = [known_stash(optimizer) for optimizer in optimizers]
    for stash in stashes:
        drop_spent(stash)
    earlier: dict[int, Earlier] = {}
    for stash in stashes:
        if stash.pending is not None:
            stash.forget_cleared(pairs)
        earlier.update(stash.backward.earlier)
    found = gather(pairs, inverse, keep=any(stash.keeps_scaled_gradients for stash in stashes), earlier=earlier)
    for optimizer, stash in zip(optimizers, stashes, strict=True):
        stash.pending = None
        stash.backward.earlier.clear()
        stash.gathered = True
        first = first_gradient(optimizer)
        stash.backward.brought = None if first is None else TensorWeakRef(first)
        if stash.keeps_scaled_gradients:
            own = stash.masters.pairs(optimizer.param_groups)
            stash.backward.left = {id(param) for param, master in own if param is not master and param.grad is not None}
    if inverse is None:
        return
    found = distributed.agree(found, [param for param, _ in pairs])
    overall = torch.zeros_like(scaler.scale_tensor)
    for found_inf in found.values():
        overall = torch.maximum(overall, found_inf.to(overall.device))
    groups = {id(group): group for stash in stashes if (group := stash.around.process_group) is not None}
    for group in groups.values():
        torch.distributed.all_reduce(overall, torch.distributed.ReduceOp.MAX, group=group)
    # A loss that overflows twice before one step skips that step once, so only its first overflow moves the scale.
    known = [f.to(overall.device) for stash in stashes for s, f in stash.found if s is scaler]
    for optimizer, stash in zip(optimizers, stashes, strict=True):
        stash.note_found(scaler, overall)
        if stash.two_passes:
            _move_nothing(optimizer, stash)
    here = set(map(id, stashes))
    others = {id(other): other for stash in stashes for _, other in sharing(stash) if id(other) not in here}
    for other in others.values():  # these optimizers would step with shared gradients, which may have overflowed
        other.note_found(scaler, overall)
    scaler.record(overall * (1 - torch.stack(known).amax()) if known else overall)


@torch.no_grad()
def _move_nothing(optimizer: Any, stash: Stash) -> None:
    """If a gradient overflowed, make all gradients 0; no sync.

    A wrapper such as SAM moves the weights by them before its second pass. Weights of NaN would ruin the running
    statistics of batch norms for good. The step itself will be skipped.
    """
    overflow = torch.stack([found_inf.to(stash.found[0][1].device) for _, found_inf in stash.found]).amax() > 0
    for _, master in stash.masters.pairs(optimizer.param_groups):
        if master.grad is not None:
            grad = held(master.grad)
            grad.masked_fill_(overflow.to(grad.device), 0)


def unscale_pending(optimizer: Any) -> None:
    """Unscale gradients that a delayed exit of `scale_loss` left scaled; no sync.

    The gradients of all optimizers of that exit are unscaled together: they may share parameters, and one overflow
    skips the steps of all. So are those that other exits left for optimizers which share parameters with this one.
    """
    stash = stash_of(optimizer)
    if stash is None:
        return
    for holder, known in ((optimizer, stash), *sharing(stash)):
        if (pending := known.pending) is None:
            continue
        left = [other for other, its in siblings(known) if its.pending is pending and other is not holder]
        unscale([holder, *left], pending.scaler, inverse_of(pending.scale) if pending.scaling else None)
        if pending.updates == pending.scaler.updates:  # else a later exit has moved the scale for this one too
            pending.scaler.update()

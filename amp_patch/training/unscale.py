"""Unscales gradients: the model's scaled gradients become FP32 gradients of the masters, and overflow is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from amp_patch.masters.grad_field import own_grad
from amp_patch.masters.gradients import Aside, FoundInf, gather, held
from amp_patch.masters.masters import has_gradient
from amp_patch.multi_tensor.checks import Number
from amp_patch.support import distributed
from amp_patch.training.loss_scaler import LossScaler
from amp_patch.training.stash import Stash, distinct_pairs, known_stash, sharing, siblings, stash_of


def first_of(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor | None:
    """Return the first gradient in `pairs`: the master's, else its parameter's; None if no pair has a gradient."""
    for param, master in pairs:
        if param is not master and has_gradient(master):
            return master.grad
        if (own := own_grad(param)) is not None:
            return own
    return None


def unscale(optimizers: Sequence[Any], scaler: LossScaler, inverse: Number | None) -> None:
    """Unscale the model's gradients into their masters' FP32 gradients, and record overflow on the device; no sync.

    After an exception all these gradients are dropped, since some may be unscaled already without a check. The caller
    calls `route_grads` of the stashes afterwards; in a body, its end does that.

    Args:
        optimizers: the optimizers of the gradients. A parameter that several of them hold is unscaled once.
        scaler: the scaler of the loss.
        inverse: 1 / scale, FP32, shape []; 1.0 if the loss was not scaled; None if gradients are not checked either.
    """
    stashes = [known_stash(optimizer) for optimizer in optimizers]
    pairs = distinct_pairs(optimizers)
    try:
        found = _unscale(optimizers, stashes, pairs, inverse)
        if inverse is not None:
            _record(found, optimizers, stashes, pairs, scaler)
    except BaseException:
        drop(pairs)
        for stash in stashes:
            stash.pending, stash.backward.aside = None, {}
        raise


def end_direct(stash: Stash) -> None:
    """Unscale the gradients that a body's backward has left on the masters of `stash` themselves; no sync."""
    direct, stash.backward.direct = stash.backward.direct, None
    if direct is not None:
        direct.finish()


def drop(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Drop the gradients of the parameters and of their masters."""
    for param, master in pairs:
        param.grad = master.grad = None


def _unscale(
    optimizers: Sequence[Any], stashes: list[Stash], pairs: Sequence[tuple[Tensor, Tensor]], inverse: Number | None
) -> FoundInf:
    """Move the gradients of `pairs` to their masters; return the overflow flag of each device, as `gather` does."""
    aside: dict[int, Aside] = {}
    found: FoundInf = {}
    for stash in stashes:
        if stash.backward.direct is not None:
            end_direct(stash)
        if stash.backward.direct_found:
            add(found, stash.backward.direct_found)
            stash.backward.direct_found.clear()
        if stash.pending is not None:
            stash.forget_cleared(pairs)
        aside.update(stash.backward.aside)
    of_deferred, rest = _leave_in_low_precision(optimizers, stashes, pairs, inverse)
    add(found, of_deferred)
    if rest:
        add(found, gather(rest, inverse, aside=aside))
    for optimizer, stash in zip(optimizers, stashes, strict=True):
        stash.pending = None
        stash.backward.aside.clear()
        stash.gathered = True
        waiting = stash.masters.waiting
        if waiting:
            stash.backward.first_unscaled_grad = waiting.first
        else:
            first = first_of(stash.masters.pairs(optimizer.param_groups))
            stash.backward.first_unscaled_grad = None if first is None else TensorWeakRef(first)
    return found


def _record(
    found: FoundInf,
    optimizers: Sequence[Any],
    stashes: list[Stash],
    pairs: Sequence[tuple[Tensor, Tensor]],
    scaler: LossScaler,
) -> None:
    """Record the overflow flags `found` for the next steps of `optimizers` and for the scaler; no sync."""
    found = distributed.agree(found, [param for param, _ in pairs])
    overall = torch.zeros_like(scaler.scale_tensor) if len(found) != 1 else next(iter(found.values()))
    for found_inf in found.values() if len(found) > 1 else ():
        overall = torch.maximum(overall, found_inf.to(overall.device))
    overall = overall.to(scaler.scale_tensor.device)
    groups = {id(group): group for stash in stashes if (group := stash.neighbours.process_group) is not None}
    for group in groups.values():
        torch.distributed.all_reduce(overall, torch.distributed.ReduceOp.MAX, group=group)
    # A loss that overflows twice before one step skips that step once, so only its first overflow moves the scale.
    known = [f.to(overall.device) for stash in stashes for s, f in stash.found if s is scaler]
    for optimizer, stash in zip(optimizers, stashes, strict=True):
        stash.note_found(scaler, overall)
        if stash.two_passes:
            _move_nothing(optimizer, stash)
        for other, its in sharing(stash):  # else `other` would step with shared gradients that have overflowed
            if all(other is not one for one in optimizers):
                its.note_found(scaler, overall)
    scaler.record(overall * (1 - torch.stack(known).amax()) if known else overall)


def add(found: FoundInf, more: FoundInf) -> None:
    """Combine the overflow flags of `more` into `found`, in place; no sync."""
    for device, found_inf in more.items():
        found[device] = torch.maximum(found[device], found_inf) if device in found else found_inf


def _leave_in_low_precision(
    optimizers: Sequence[Any], stashes: list[Stash], pairs: Sequence[tuple[Tensor, Tensor]], inverse: Number | None
) -> tuple[FoundInf, Sequence[tuple[Tensor, Tensor]]]:
    """Defer the gradients of each optimizer whose strategy takes deferred gradients, and check them for overflow.

    The step then unscales them. All other gradients are left to the caller to unscale, also the gradients of an
    optimizer whose gradients a wrapper or another optimizer reads.

    Returns:
        The overflow flag of each device, as `gather` returns it, and the pairs whose gradients are not deferred.
    """
    found: FoundInf = {}
    gone: set[int] = set()
    for optimizer, stash in zip(optimizers, stashes, strict=True):
        if stash.masters.waiting is None or not stash.unobserved:
            continue
        if (of_these := stash.masters.take_half(optimizer.param_groups, inverse)) is not None:
            add(found, of_these)
            gone.update(map(id, stash.masters.of_groups(optimizer.param_groups).low))
    return found, [pair for pair in pairs if id(pair[0]) not in gone] if gone else pairs


@torch.no_grad()
def _move_nothing(optimizer: Any, stash: Stash) -> None:
    """If a gradient overflowed, set all gradients of a two-pass optimizer (SAM) to 0; no sync.

    A wrapper such as SAM moves the weights by these gradients before its second pass. With NaN in the weights, the
    second pass would write NaN into the running statistics of batch norms. The step itself is skipped later.
    """
    overflow = torch.stack([found_inf.to(stash.found[0][1].device) for _, found_inf in stash.found]).amax() > 0
    for _, master in stash.masters.pairs(optimizer.param_groups):
        if master.grad is not None:
            grad = held(master.grad)
            grad.masked_fill_(overflow.to(grad.device), 0)


def unscale_pending(optimizer: Any) -> None:
    """Unscale gradients that a delayed exit of `scale_loss` left scaled; no sync.

    All optimizers of that exit are unscaled together, because they may share parameters, and one overflow skips the
    steps of all. If an optimizer shares parameters with this one, gradients of its delayed exits are unscaled too.
    """
    stash = stash_of(optimizer)
    if stash is None:
        return
    for holder, known in ((optimizer, stash), *sharing(stash)):
        if (pending := known.pending) is None:
            continue
        left = [other for other, its in siblings(known) if its.pending is pending and other is not holder]
        unscale([holder, *left], pending.scaler, pending.inverse())
        for other in (holder, *left):
            known_stash(other).route_grads()
        if pending.updates == pending.scaler.updates:  # else a later exit has updated the scale
            pending.scaler.update()
        else:
            pending.scaler.defer()

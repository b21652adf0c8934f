"""Unscales gradients: the model's scaled gradients become FP32 gradients of the masters, and overflow is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from amp_patch.masters import on_host
from amp_patch.masters.grad_field import own_grad
from amp_patch.masters.gradients import Aside, FoundInf, gather
from amp_patch.masters.gradients import held as values_of
from amp_patch.masters.masters import has_gradient
from amp_patch.masters.of_optimizer import GroupParams
from amp_patch.multi_tensor.checks import Number
from amp_patch.support import distributed
from amp_patch.training.joints import Optimizer
from amp_patch.training.loss_scaler import LossScaler
from amp_patch.training.stash import Stash, distinct_pairs, known_stash, no_gradient, sharing, siblings, stash_of

Held = list[tuple[Stash, GroupParams]]  # the stashes of optimizers, and the parameters in their groups
Pairs = Sequence[tuple[Tensor, Tensor]]  # (parameter, master)


def first_of(pairs: Pairs) -> Tensor | None:
    """Return the first gradient in `pairs`: the master's, else its parameter's; None if no pair has a gradient."""
    for param, master in pairs:
        if param is not master and has_gradient(master):
            return master.grad
        if (own := own_grad(param)) is not None:
            return own
    return None


def unscale(
    optimizers: Sequence[Any], scaler: LossScaler, inverse: Number | None, direct: FoundInf | None = None
) -> None:
    """Unscale the model's gradients into their masters' FP32 gradients, and record overflow on the device; no sync.

    After an exception all these gradients are dropped, since some may be unscaled already without a check. The caller
    calls `route_grads` of the stashes afterwards; in a body, its end does that.

    Args:
        optimizers: the optimizers of the gradients. A parameter that several of them hold is unscaled once.
        scaler: the scaler of the loss.
        direct: receives the overflow flags of gradients that the backward has left on masters themselves.
        inverse: 1 / scale, FP32, shape []; 1.0 if the loss was not scaled; None if gradients are not checked either.
    """
    stashes = [known_stash(optimizer) for optimizer in optimizers]
    held = [(stash, stash.masters.known(o.param_groups)) for o, stash in zip(optimizers, stashes, strict=True)]
    pairs = distinct_pairs([known for _, known in held])
    try:
        found = _unscale(held, pairs, inverse, {} if direct is None else direct)
        if inverse is not None:
            _record(found, held, pairs, scaler)
            for stash, _ in held:
                if stash.masters.links.on_host:  # copies of the flags, behind those of the gradients
                    stash.found = [(known, on_host.number(found_inf)) for known, found_inf in stash.found]
    except BaseException:
        drop(pairs)
        for stash in stashes:
            stash.pending = None
            stash.masters.forget_aside(lambda _: True)
        raise


def drop(pairs: Pairs) -> None:
    """Drop the gradients of the parameters and of their masters."""
    for param, master in pairs:
        param.grad = master.grad = None


def _unscale(held: Held, pairs: Pairs, inverse: Number | None, direct: FoundInf) -> FoundInf:
    """Move the gradients of `pairs` to their masters; return the overflow flag of each device, as `gather` does."""
    aside: dict[Tensor, Aside] = {}
    found: FoundInf = {}
    for stash, _ in held:
        if stash.masters.direct is not None:
            stash.masters.end_direct()
    add(found, direct)
    for stash, _ in held:
        if stash.pending is not None:
            add(found, stash.pending.found)
            stash.forget_cleared()
        for record in stash.masters.aside:
            aside[record.aside.param] = record.aside
    of_deferred, rest = _leave_in_low_precision(held, pairs, inverse)
    add(found, of_deferred)
    if rest:
        add(found, gather(rest, inverse, aside=aside))
    for stash, known in held:
        stash.pending = None
        if stash.masters.aside:
            stash.masters.forget_aside(lambda _: True)
        waiting = stash.masters.waiting
        if waiting:
            stash.unscaled = waiting.first
        else:
            first = first_of(known.pairs)
            stash.unscaled = no_gradient if first is None else TensorWeakRef(first)
    return found


def _record(found: FoundInf, held: Held, pairs: Pairs, scaler: LossScaler) -> None:
    """Record the overflow flags `found` for the next steps of the optimizers and for the scaler; no sync."""
    if len(found) != 1 or any(known.is_sharded for _, known in held):
        found = distributed.agree(found, [param for param, _ in pairs])
    overall = torch.zeros_like(scaler.scale_tensor) if len(found) != 1 else next(iter(found.values()))
    for found_inf in found.values() if len(found) > 1 else ():
        overall = torch.maximum(overall, found_inf.to(overall.device))
    overall = overall.to(scaler.scale_tensor.device)
    for group in {stash.neighbours.siblings.process_group for stash, _ in held}:
        if group is not None:
            torch.distributed.all_reduce(overall, torch.distributed.ReduceOp.MAX, group=group)
    if on_host.used and any(stash.found for stash, _ in held):
        on_host.arrive()
    # A loss that overflows twice before one step skips that step once, so only its first overflow moves the scale.
    earlier = [f.to(overall.device) for stash, _ in held for s, f in stash.found if s is scaler]
    for stash, known in held:
        stash.note_found(scaler, overall)
        if stash.passes > 1:
            _move_nothing(stash, known.masters)
        for _, its in sharing(stash):  # else the other optimizer would step with shared gradients that have overflowed
            if all(its is not one for one, _ in held):
                its.note_found(scaler, overall)
    scaler.record(overall * (1 - torch.stack(earlier).amax()) if earlier else overall)


def add(found: FoundInf, more: FoundInf) -> None:
    """Combine the overflow flags of `more` into `found`, in place; no sync."""
    for device, found_inf in more.items():
        found[device] = torch.maximum(found[device], found_inf) if device in found else found_inf


def _leave_in_low_precision(held: Held, pairs: Pairs, inverse: Number | None) -> tuple[FoundInf, Pairs]:
    """Defer the gradients of each optimizer whose strategy takes deferred gradients, and check them for overflow.

    The step then unscales them. All other gradients are left to the caller to unscale, also the gradients of an
    optimizer whose gradients a wrapper or another optimizer reads.

    Returns:
        The overflow flag of each device, as `gather` returns it, and the pairs whose gradients are not deferred.
    """
    found: FoundInf = {}
    for stash, known in held:
        if stash.masters.waiting is None or not stash.unobserved:
            continue
        if (of_these := stash.masters.take_half(known, inverse)) is not None:
            add(found, of_these)
            # Nothing else holds these parameters (`unobserved`), and `gather` skips those without a gradient.
            pairs = known.own if len(held) == 1 else pairs
    return found, pairs


@torch.no_grad()
def _move_nothing(stash: Stash, masters: list[Tensor]) -> None:
    """If a gradient overflowed, set all gradients of a two-pass optimizer (SAM) to 0; no sync.

    A wrapper such as SAM moves the weights by these gradients before its second pass. With NaN in the weights, the
    second pass would write NaN into the running statistics of batch norms. The step itself is skipped later.
    """
    overflow = torch.stack([found_inf.to(stash.found[0][1].device) for _, found_inf in stash.found]).amax() > 0
    for master in masters:
        if master.grad is not None:
            grad = values_of(master.grad)
            grad.masked_fill_(overflow.to(grad.device), 0)


def unscale_pending(optimizer: Optimizer) -> None:
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

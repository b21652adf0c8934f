"""Refusal of gradients that another GradScaler, or `scale_loss`, has unscaled or must unscale."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.utils.weak import TensorWeakRef

from amp_patch.support.reach import reach_of
from amp_patch.training.innermost import innermost
from amp_patch.training.stash import Stash, stash_of
from amp_patch.training.unscale import first_of

scalers: weakref.WeakSet[Any] = weakref.WeakSet()  # every enabled GradScaler of amp_patch in the process


def note(scaler: Any, optimizer: Any) -> None:
    """Record the first gradient of `optimizer` that `scaler` has unscaled: other scalers refuse it (`refuse`)."""
    grad = _first_gradient(optimizer)
    vars(scaler)["_per_optimizer_states"][id(optimizer)]["grad"] = None if grad is None else TensorWeakRef(grad)


def refuse(scaler: Any, optimizer: Any, method: str) -> None:
    """Raise if the optimizer's gradients certainly have another scale than that of `scaler`."""
    grad, own = _first_gradient(optimizer), vars(scaler)
    if grad is None or own["_scale"] is None:
        return
    advice = "call scale(), unscale_(), step() and update() of one scaler for the gradients of one optimizer"
    stash = stash_within(optimizer)
    unscaled = None if stash is None else stash.unscaled
    if stash is not None and (stash.pending is not None or (unscaled is not None and unscaled() is grad)):
        raise RuntimeError(
            f"GradScaler.{method}: the gradients of this {type(optimizer).__name__} came through amp.scale_loss, "
            "which scales and unscales them; call optimizer.step() for them, or scaler.scale(loss).backward() "
            "instead of it"
        )
    for other in map(vars, set(scalers) - {scaler}):
        states = dict(other["_per_optimizer_states"])
        served = states.get(id(optimizer), {"stage": OptState.READY})
        noted = served.get("grad")
        if served["stage"] is not OptState.READY and noted is not None and noted() is grad:
            raise RuntimeError(
                f"GradScaler.{method}: another GradScaler has unscaled the gradients of this "
                f"{type(optimizer).__name__} already; {advice}"
            )
        waiting = all(state["stage"] is OptState.READY for state in states.values())
        if other["_has_scaled"] and not own["_has_scaled"] and waiting:
            raise RuntimeError(
                f"GradScaler.{method}: this scaler has scaled nothing since its last update(), and another "
                f"GradScaler has, which no optimizer has stepped with; {advice}"
            )


def has_scaled_loss_of(params: Sequence[Tensor]) -> bool:
    """Tell whether a scaler that has not unscaled or stepped any optimizer has scaled a loss of `params`.

    If such a scaler's loss was freed, the loss's parameters are unknown, and the result is True.
    """
    waiting = list(map(vars, scalers))
    losses = [of["_loss"] for of in waiting if of["_has_scaled"] and not of["_has_served"] and of["_loss"] is not None]
    own = set(map(id, params))
    return any((loss := ref()) is None or not own.isdisjoint(reach_of(loss).leaves) for ref in losses)


def stash_within(optimizer: Any) -> Stash | None:
    """Return the stash of an optimizer that went through `initialize`; None for other optimizers."""
    return None if (stash := stash_of(innermost(optimizer))) is None or not stash.enabled else stash


def _first_gradient(optimizer: Any) -> Tensor | None:
    """Return the first gradient for the next step of `optimizer`, a master's or a parameter's; None without any."""
    stash, groups = stash_of(innermost(optimizer)), innermost(optimizer).param_groups
    if stash is None:
        return next((p.grad for group in groups for p in group["params"] if p.grad is not None), None)
    waiting = stash.masters.waiting
    if waiting and (grad := waiting.first()) is not None:
        return grad
    return first_of(stash.masters.pairs(groups))

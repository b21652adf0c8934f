"""Checks of the first iterations for mistakes in a training loop that would otherwise train wrongly in silence."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.masters.grad_field import own_grad, with_gradient
from amp_patch.masters.masters import LinkList, has_gradient
from amp_patch.support.generated_class import base_class
from amp_patch.support.patches import Installation, Patches
from amp_patch.support.reach import reach_of
from amp_patch.support.scripts_line import frames, warn
from amp_patch.training.joints import Optimizer
from amp_patch.training.scaled_backward import ScaledBackward, refuse_too_late
from amp_patch.training.stash import Neighbours, Stash, body_events, has_unscaled, known_stash
from amp_patch.training.training import Training, all_optimizers
from amp_patch.watch import scaler_mixtures

# The optimizers about whose first gradients a warning was given, or ruled out.
_seen = weakref.WeakSet[Neighbours]()
_SCALERS_FILE = torch.amp.GradScaler.step.__code__.co_filename
_WRITE = "write `with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"


def refuse_unscaled(of_loss: Sequence[Tensor], scale: Tensor, params: list[Tensor]) -> None:
    """Raise if backward in a body ran through the loss itself, so that the gradients are not scaled. May sync.

    Args:
        of_loss: the gradients of the loss in the body's backward passes, none of which used the scaled loss.
        scale: the scale. The exit would divide the gradients by it.
        params: the parameters of the body's optimizers.
    """
    if not with_gradient(params):
        return  # `torch.autograd.grad` returned the gradients, and stored none
    number = scale.item()
    if max(grad.detach().abs().max().item() for grad in of_loss) ** 2 >= number > 1.0:
        return  # correct: user code has multiplied the loss by `amp.loss_scale(optimizer)`
    raise RuntimeError(
        f"scale_loss: a backward pass in the body went through the loss, and none through the scaled loss: the exit "
        f"would make these gradients {number:g} times too small; {_WRITE}, not `loss.backward()`"
    )


def look_in(body: ScaledBackward, scaled: Tensor) -> None:
    """Watch the backward passes in the first body of its optimizers."""
    body.others = OtherBackwards()
    body.hooks.append(body.others)
    masters = (master for new in body.parts for master in new.linked_masters)
    body.others.watch(scaled, [*body.params, *masters])


def look_back(body: ScaledBackward) -> None:
    """Raise or warn if a body has made gradients without the scaled loss.

    If the body has not used the scaled loss at all, make a later backward pass through it raise.
    """
    if body.of_scaled:
        if body.others is not None:
            body.others.warn()
    elif of_loss := [grad for grad in body.of_loss if grad is not None]:
        refuse_unscaled(of_loss, body.scale, body.params)
    else:
        if (scaled := body.returned()) is not None:
            refuse_too_late(scaled, weakref.ref(body.stashes[0]))
        warn_of_other_gradients(body.params, body.had_grad or ())


def warn_of_other_gradients(params: list[Tensor], before: Sequence[int]) -> None:
    """Warn if parameters got gradients in a body, but no backward pass went through its loss.

    Args:
        params: the parameters of the body's optimizers.
        before: the indices of the parameters that had a gradient when the body began.
    """
    if len(with_gradient(params)) > len(before):
        warn(
            "scale_loss: gradients came in the body, and no backward pass went through the loss that it was given; "
            f"the exit divides them by the loss scale all the same; {_WRITE}, with that loss"
        )


def warn_of_dropped(stash: Stash, params: list[Tensor]) -> None:
    """Warn that a body drops gradients of cast parameters that a backward pass outside of all bodies has left."""
    if not (left := with_gradient(params)):
        return
    name = stash.names().get(params[left[0]], "a parameter of a later group")
    warn(
        f"scale_loss: {name} has a gradient of a backward pass outside of scale_loss"
        f"{f', and so have {len(left) - 1} more' if len(left) > 1 else ''}, which is dropped; if it belongs to this "
        f"step, {_WRITE} for each backward pass; if not, call optimizer.zero_grad() before"
    )


def warn_of_scaled(clipped: Sequence[Tensor]) -> None:
    """Warn if user code clips gradients that are still scaled: in a body, after a delayed exit, or by a GradScaler."""
    for optimizer in all_optimizers():
        stash = known_stash(optimizer)
        body, pending = stash.neighbours.body(), stash.pending
        way = "clip between the `with` block of the last micro-batch and `optimizer.step()`"
        if body is not None and body.now.scaling:
            where = "in the body of scale_loss"
        elif body is None and pending is not None and pending.scaling:
            where = "after scale_loss(..., delay_unscale=True)"
        elif _is_scaled_by_scaler(optimizer, stash):
            where, way = "before `scaler.unscale_(optimizer)`", "call that first"
        else:
            continue
        known = stash.masters.of_groups(optimizer.param_groups)
        if not {*known.params, *known.masters}.isdisjoint(clipped):
            warn(f"clipping: called {where}, where the gradients are multiplied by the loss scale; {way}")
            return


def warn_of_no_scaler_step(optimizer: Optimizer, stash: Stash) -> bool:
    """Warn once if a GradScaler has scaled the gradients and the script calls `optimizer.step()` without it.

    Returns:
        Whether this call has warned.
    """
    if stash.neighbours in _seen or not _is_scaled_by_scaler(optimizer, stash) or _in_scaler() is not None:
        return False
    _seen.add(stash.neighbours)
    warn(
        f"{base_class(optimizer).__name__}.step: a GradScaler has scaled its gradients, and has not unscaled them; "
        "write `scaler.step(optimizer)` and `scaler.update()` in place of `optimizer.step()`"
    )
    return True


def _is_scaled_by_scaler(optimizer: Optimizer, stash: Stash) -> bool:
    """Tell whether a GradScaler that has stepped no optimizer yet has scaled the gradients of the first step."""
    if stash.bodies or stash.unscaled or stash.neighbours.has_stepped:
        return False
    params = stash.masters.of_groups(optimizer.param_groups).distinct_params
    return bool(with_gradient(params)) and scaler_mixtures.has_scaled_loss_of(params)


def _in_scaler() -> Any:
    """Return the innermost calling frame that runs a method of GradScaler; None if no calling frame does."""
    return next((frame for frame in frames() if frame.f_code.co_filename == _SCALERS_FILE), None)


def warn_of_no_body(optimizer: Optimizer, stash: Stash) -> None:
    """Warn once if the gradients of the optimizer's first step came from a backward pass outside of `scale_loss`."""
    if stash.neighbours in _seen or not stash.scales_loss or with_gradient(stash.masters.links.params):
        return  # gradients of parameters with masters: `_warn_of_ungathered` of step.py has warned of them already
    rates = [group.get("lr") for group in optimizer.param_groups]
    if all(rate == 0 for rate in rates if not getattr(rate, "is_cuda", False)):
        return  # torch.distributed.checkpoint initializes the state by such a step, with gradients of zeros
    own = [param for param, master in stash.masters.pairs(optimizer.param_groups) if param is master]
    if _in_scaler() is None and with_gradient(own):
        _seen.add(stash.neighbours)
        warn(
            f"{base_class(optimizer).__name__}.step: its gradients came through no scale_loss, so that small ones of "
            f"FP16 are lost and none was checked; {_WRITE}"
        )


class OtherBackwards:
    """A detector of backward passes in a body that reach parameters of its optimizers without the scaled loss."""

    def __init__(self) -> None:
        self._running, self._found = 0, False
        self._handles: list[Any] = []

    def watch(self, scaled: Tensor, params: list[Tensor]) -> None:
        """Register hooks, until `remove`, that note a backward pass which reaches `params` but not `scaled`."""
        self._handles.append(scaled.register_hook(self._begins))
        for param in params:
            if param.requires_grad:
                self._handles.append(param.register_post_accumulate_grad_hook(self._reached))

    def _begins(self, grad: Tensor) -> None:
        self._running += 1
        torch.autograd.Variable._execution_engine.queue_callback(self._ends)

    def _ends(self) -> None:
        self._running -= 1

    def _reached(self, param: Tensor) -> None:
        self._found = self._found or not self._running

    def remove(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def warn(self) -> None:
        """Warn if the hooks of `watch` have noted a backward pass: the exit divides its gradients by the scale too."""
        if self._found:
            warn(
                "scale_loss: a backward pass in the body went past the scaled loss, and the exit divides its gradients "
                "by the loss scale too; add the losses, or give each a scale_loss of its own"
            )


def warn_of_untrained(body: ScaledBackward) -> None:
    """Warn once if the loss of a body depends on no parameter of its optimizers, but has made gradients of others.

    If it has made gradients of inputs alone, do not warn: an attack on a frozen model needs them.
    """
    loss, stashes, params = body.returned(), body.stashes, body.params
    if loss is None or any(stash.neighbours in _seen or has_unscaled(stash) for stash in stashes):
        return
    if with_gradient(params) or any(stash.neighbours.sharded for stash in stashes):
        return
    leaves = reach_of(loss).leaves
    others = [leaf for leaf in leaves.values() if isinstance(leaf, nn.Parameter) and own_grad(leaf) is not None]
    if not others:
        return
    _seen.update(stash.neighbours for stash in stashes)
    if leaves.keys().isdisjoint(map(id, params)):
        names = stashes[0].names()
        named = [names.get(leaf, f"a parameter of shape {list(leaf.shape)}") for leaf in others]
        held = " and ".join(base_class(optimizer).__name__ for optimizer in body.optimizers)
        warn(
            f"scale_loss: the loss depends on no parameter of {held}, whose step will change nothing; its gradients "
            f"went to {', '.join(named[:4])}"
            f"{f' and {len(named) - 4} more' if len(named) > 4 else ''}: give scale_loss the optimizer of those, or "
            "make the optimizer of the parameters of the model that you train, after it was copied or loaded"
        )


# ----------------------------------------------------------------------------------------------------------------------
# GradScalers

_installation = Installation()
scalers: weakref.WeakSet[Any] = weakref.WeakSet()  # the GradScalers that have made their scale


def watch_scalers(training: Training, *_: Any) -> None:
    """If a loss of `training` is scaled, note each GradScaler that makes its scale in `scalers`; idempotent."""
    if not any(scaler.scales for scaler in training.scalers):
        return
    _installation.install(_replace)


def _replace(patches: Patches) -> None:
    original = torch.amp.GradScaler._lazy_init_scale_growth_tracker

    @functools.wraps(original)
    def noting(scaler: Any, dev: torch.device) -> None:
        original(scaler, dev)
        scalers.add(scaler)

    patches.set(torch.amp.GradScaler, original.__name__, noting)


def refuse_scaled(loss: Tensor) -> None:
    """Raise if a GradScaler has scaled `loss`: autograd has then saved the scaler's scale tensor as a factor."""
    try:
        factor = getattr(loss.grad_fn, "_saved_other", None)
    except RuntimeError:  # backward has freed the graph: a second backward in the body raises torch's error
        return
    if not isinstance(factor, Tensor) or factor.dim() or factor.dtype is not torch.float32:
        return
    if any(vars(scaler)["_scale"] is factor for scaler in scalers):
        raise RuntimeError(
            "scale_loss: the loss was scaled by a GradScaler already, and would be scaled twice; give "
            "amp.scale_loss the loss itself, and leave the GradScaler out: `scaled_loss.backward()` and "
            "`optimizer.step()`"
        )


# ----------------------------------------------------------------------------------------------------------------------
# Steps


def look_at_step(optimizer: Any, stash: Stash, links: LinkList) -> None:
    """Warn of a step whose gradients came past `scale_loss`, or were not brought to the masters."""
    if stash.bodies or not warn_of_no_scaler_step(optimizer, stash):
        _warn_of_ungathered(optimizer, stash, links)


def _warn_of_ungathered(optimizer: Optimizer, stash: Stash, links: LinkList) -> None:
    """Warn of gradients on cast parameters that no exit of `scale_loss` has moved to their masters (`links`).

    The loss of another optimizer may rightly leave such gradients (a GAN's generator loss fills the discriminator's).
    So if a body of another optimizer has run since this one's last, a gradient on any master suppresses the warning.
    """
    left, around = with_gradient(links.params), stash.neighbours
    if not (left or stash.masters.strays):
        return
    strays = {links.records[index] for index in left}.union(stash.masters.strays)
    # Whether a body of another optimizer is running, or has run since this optimizer's last body.
    others = bool(around.other_bodies) or around.ended != body_events.count
    if others and any(map(has_gradient, links.masters)):
        return
    named = [name for name, _, record in stash.named(optimizer.param_groups) if record in strays]
    if named:
        warn(
            f"{base_class(optimizer).__name__}.step: {named[0]} has a gradient on the model that was never "
            f"gathered for this optimizer{f', and so have {len(named) - 1} more' if len(named) > 1 else ''}: the step "
            "does without; call backward() inside `with amp.scale_loss(loss, optimizer)`"
        )

"""Checks of the first iterations for mistakes in a training loop that would otherwise train wrongly in silence."""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.masters.grad_field import own_grad, with_gradient
from amp_patch.support.generated_class import base_class
from amp_patch.support.patches import Installation, Patches
from amp_patch.support.reach import reach_of
from amp_patch.support.scripts_line import frames, stacklevel
from amp_patch.training.joints import Optimizer
from amp_patch.training.stash import Neighbours, Stash, has_unscaled, known_stash, stash_of

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


def warn_of_other_gradients(params: list[Tensor], before: Sequence[int]) -> None:
    """Warn if parameters got gradients in a body, but no backward pass went through its loss.

    Args:
        params: the parameters of the body's optimizers.
        before: the indices of the parameters that had a gradient when the body began.
    """
    if len(with_gradient(params)) > len(before):
        warnings.warn(
            "scale_loss: gradients came in the body, and no backward pass went through the loss that it was given; "
            f"the exit divides them by the loss scale all the same; {_WRITE}, with that loss",
            stacklevel=stacklevel(),
        )


def warn_of_dropped(stash: Stash, params: list[Tensor]) -> None:
    """Warn that a body drops gradients of cast parameters that a backward pass outside of all bodies has left."""
    if not (left := with_gradient(params)):
        return
    name = stash.names().get(params[left[0]], "a parameter of a later group")
    warnings.warn(
        f"scale_loss: {name} has a gradient of a backward pass outside of scale_loss"
        f"{f', and so have {len(left) - 1} more' if len(left) > 1 else ''}, which is dropped; if it belongs to this "
        f"step, {_WRITE} for each backward pass; if not, call optimizer.zero_grad() before",
        stacklevel=stacklevel(),
    )


def warn_of_scaled(clipped: Sequence[Tensor], optimizers: Sequence[Any]) -> None:
    """Warn if user code clips gradients that are still scaled: in a body, after a delayed exit, or by a GradScaler."""
    for optimizer in optimizers:
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
            warnings.warn(
                f"clipping: called {where}, where the gradients are multiplied by the loss scale; {way}",
                stacklevel=stacklevel(),
            )
            return


# Each function receives parameters, and tells whether a GradScaler that has not stepped any optimizer yet has scaled
# the loss of their gradients. `grad_scaler.py` adds one.
of_waiting_scaler: list[Callable[[Sequence[Tensor]], bool]] = []


def warn_of_no_scaler_step(optimizer: Optimizer, stash: Stash) -> bool:
    """Warn once if a GradScaler has scaled the gradients and the script calls `optimizer.step()` without it.

    Returns:
        Whether this call has warned.
    """
    if stash.neighbours in _seen or not _is_scaled_by_scaler(optimizer, stash) or _in_scaler() is not None:
        return False
    _seen.add(stash.neighbours)
    warnings.warn(
        f"{base_class(optimizer).__name__}.step: a GradScaler has scaled its gradients, and has not unscaled them; "
        "write `scaler.step(optimizer)` and `scaler.update()` in place of `optimizer.step()`",
        stacklevel=stacklevel(),
    )
    return True


def _is_scaled_by_scaler(optimizer: Optimizer, stash: Stash) -> bool:
    """Tell whether a GradScaler that has stepped no optimizer yet has scaled the gradients of the first step."""
    if stash.bodies or stash.unscaled or stash.neighbours.has_stepped:
        return False
    params = stash.masters.of_groups(optimizer.param_groups).distinct_params
    return bool(with_gradient(params)) and any(asks(params) for asks in of_waiting_scaler)


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
        warnings.warn(
            f"{base_class(optimizer).__name__}.step: its gradients came through no scale_loss, so that small ones of "
            f"FP16 are lost and none was checked; {_WRITE}",
            stacklevel=stacklevel(),
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
            warnings.warn(
                "scale_loss: a backward pass in the body went past the scaled loss, and the exit divides its gradients "
                "by the loss scale too; add the losses, or give each a scale_loss of its own",
                stacklevel=stacklevel(),
            )


def refuse_too_late(scaled: Tensor, ref: weakref.ref[Stash]) -> None:
    """Make a backward pass through a scaled loss that its body did not use raise, unless another body is running."""

    def hook(grad: Tensor) -> None:
        if (stash := ref()) is not None and stash.neighbours.body() is None:
            raise RuntimeError(
                "scale_loss: backward of the scaled loss after its with block has ended, where nothing unscales the "
                "gradients; call scaled_loss.backward() inside the block"
            )

    scaled.register_hook(hook)


def warn_of_untrained(loss: Tensor | None, optimizers: Sequence[Any], params: list[Tensor]) -> None:
    """Warn once if the loss depends on no parameter of `optimizers`, but has made gradients of other parameters.

    If it has made gradients of inputs alone, do not warn: an attack on a frozen model needs them.
    """
    stashes = [known_stash(optimizer) for optimizer in optimizers]
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
        held = " and ".join(base_class(optimizer).__name__ for optimizer in optimizers)
        warnings.warn(
            f"scale_loss: the loss depends on no parameter of {held}, whose step will change nothing; its gradients "
            f"went to {', '.join(named[:4])}"
            f"{f' and {len(named) - 4} more' if len(named) > 4 else ''}: give scale_loss the optimizer of those, or "
            "make the optimizer of the parameters of the model that you train, after it was copied or loaded",
            stacklevel=stacklevel(),
        )


# ----------------------------------------------------------------------------------------------------------------------
# GradScalers

_installation = Installation()
scalers: weakref.WeakSet[Any] = weakref.WeakSet()  # the GradScalers that have made their scale


def watch_scalers() -> None:
    """Patch torch's GradScaler to add each one that makes its scale to `scalers`; idempotent."""
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


class SupportsScaling:
    """The descriptor of `_step_supports_amp_scaling`, which torch's `GradScaler.step` reads before anything else.

    The read raises if the GradScaler would unscale gradients that `scale_loss` has unscaled, or would leave gradients
    on a cast model's weights, where the step on the masters does not find them. Otherwise it returns the attribute's
    value without amp_patch: whether the optimizer's own step unscales, and skips after an overflow.
    """

    NAME = "_step_supports_amp_scaling"
    owner: Any = None  # the class that defines the attribute

    def __set_name__(self, owner: type, name: str) -> None:
        SupportsScaling.owner = owner

    def __get__(self, optimizer: Optimizer, owner: Any = None) -> Any:
        if optimizer is None:
            return self
        asking = sys._getframe(1)
        if asking.f_code.co_filename == _SCALERS_FILE:
            _check_scaler(optimizer, asking.f_locals.get("self"))
        given = vars(optimizer).get(self.NAME)
        return getattr(super(self.owner, optimizer), self.NAME, False) if given is None else given

    def __set__(self, optimizer: Optimizer, value: Any) -> None:
        vars(optimizer)[self.NAME] = value


def _check_scaler(optimizer: Optimizer, scaler: Any) -> None:
    """Raise if torch's own `scaler.step(optimizer)` would unscale gradients twice, or not move them to masters.

    Return if `scaler` is of a class of amp_patch, or if the optimizer is in no training.
    """
    stash = stash_of(optimizer)
    if stash is None or not stash.enabled or any(c.__module__.startswith("amp_patch") for c in type(scaler).__mro__):
        return
    name = base_class(optimizer).__name__
    if stash.pending is not None or has_unscaled(stash):
        if stash.scales_loss:
            raise RuntimeError(
                f"GradScaler.step: the gradients of this {name} came through amp.scale_loss, which scales the loss and "
                "unscales them, so that the loss is scaled twice; leave the GradScaler out: "
                "`scaled_loss.backward()` and `optimizer.step()`"
            )
    elif with_gradient(stash.masters.links.params):
        raise RuntimeError(
            f"GradScaler.step: the gradients of this {name} are on the {stash.policy.opt_level} model's low-precision "
            "parameters, and torch's GradScaler does not bring them to the FP32 masters; use amp.GradScaler() in its "
            f"place, or amp.scale_loss without a GradScaler: {_WRITE}"
        )

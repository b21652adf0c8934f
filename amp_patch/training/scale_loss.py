"""`scale_loss`, the scaled backward pass of one loss, and `loss_scale`, the factor."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.support import compiled
from amp_patch.support.fsdp import is_fsdp
from amp_patch.support.generated_class import base_class
from amp_patch.support.words import of_class
from amp_patch.training import joints
from amp_patch.training.arguments import Optimizers
from amp_patch.training.innermost import as_list, innermost
from amp_patch.training.loss_scaler import LossScaler
from amp_patch.training.scaled_backward import ScaledBackward
from amp_patch.training.stash import ATTRIBUTE, Pending, Stash, known_stash, stash_of


@compiled.eager_only
def scale_loss(
    loss: Tensor,
    optimizers: Optimizers,
    loss_id: int = 0,
    model: nn.Module | None = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[Tensor]:
    """Scale the loss for backward, and leave unscaled FP32 gradients for the optimizers.

    ::

        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    In the body, backward adds scaled gradients to the model's, which earlier delayed exits may have left. The exit
    unscales the sum, adds it to the masters' FP32 gradients of earlier exits, and records overflow on the device. After
    the exit, `param.grad` of a cast parameter returns the gradient of its master. Nothing here syncs.

    On overflow, `optimizer.step()` skips the step. This costs one sync a step, unless the optimizer skips on the
    device: torch's optimizers with `fused=True`, and FusedSGD.

    Args:
        loss: a floating tensor, any shape.
        optimizers: the optimizer, or a list of the optimizers, whose gradients this backward makes.
        loss_id: the index of the loss scale, below `initialize(num_losses=...)`.
        model: unused; Apex has it.
        delay_unscale: leave the gradients scaled on the model, for the next micro-batch to add to. Pass False for the
            last micro-batch of an iteration. (Otherwise the step unscales them.) Autograd sums such gradients in the
            type of the weights. In BF16 (O5) the sum of 64 micro-batches was off by 0.8 %, and the sum of 512 by 4 to
            7 %; in FP16 by 0.1 % and 0.3 %. With False, each exit sums in FP32 at O2 and O5.
            Implied if DistributedDataParallel's forward ran under `no_sync()`, or with `require_backward_grad_sync`
            False, and the model is cast or the loss scaled: the sum stays on the model until DDP reduces it, and all
            processes see an overflow at once.
            Implied if fully_shard holds gradients back (`set_requires_gradient_sync(False)`).
        delay_overflow_check: unscale, but do not update the scale before a later exit of this `loss_id`. If the
            gradients overflowed, the optimizer still skips its step.

    Returns:
        A context manager whose `as` target is the loss times the scale, FP32 (FP64 for an FP64 loss). If the level does
        not scale, it is the loss in FP32 or FP64.

    Raises:
        RuntimeError: an optimizer did not go through `initialize`. `optimizer.step()` in the body raises it too. (At O0
            and O4 without `skip_nonfinite` an optimizer may step there, also in a hook of backward.)
            If the loss is scaled: backward of the loss itself in the body, or of the scaled loss after the body; a
            loss that a GradScaler has scaled.
        TypeError, ValueError: a wrong loss, optimizer or loss_id. Gradients are not changed.

    If the loss depends on no parameter of `optimizers`, this warns once.

    An exception in the body drops the scaled gradients; the scale and earlier gradients stay as they were. Inside the
    body, clear gradients only with `zero_grad()` of the optimizer, or of the model given to `initialize`.
    """
    targets, stashes = [], []
    for target in targets_of(optimizers):
        stash = known_stash(target)
        if stash.scalers:
            targets.append(target)
            stashes.append(stash)
    if not targets:
        return nullcontext(loss)
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        came = f"a tensor of {loss.dtype}" if isinstance(loss, Tensor) else of_class(loss)
        raise TypeError(f"scale_loss: loss is {came}; wanted a floating-point tensor")
    for stash in stashes:
        refuse_sharded_since(stash.neighbours.siblings.unsharded, "scale_loss")
    scaler = scaler_of(stashes[0], loss_id).to(loss.device)
    for target, stash in zip(targets, stashes, strict=True):
        stash.masters.of_groups(target.param_groups)  # first, because changed groups may add to `before_backward`
        for prepare in stash.neighbours.before_backward:
            prepare(target, stash)
    if scaler.scales and not stashes[0].bodies:
        joints.tell(joints.first_loss, loss)
    known = stashes[0].neighbours.siblings
    alone = len(targets) == 1 and len(known) == 1 and not known.unowned
    return (ScaledBackward if alone else joints.shared_backward[0])(
        loss, targets, stashes, scaler, delay_unscale=delay_unscale, delay_overflow_check=delay_overflow_check
    )


def refuse_sharded_since(models: Iterable[weakref.ref[nn.Module]], caller: str) -> None:
    """Raise RuntimeError if `fully_shard` was called on one of `models`, which `initialize` received unsharded."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None or not kind.__subclasses__():  # nothing is sharded: `fully_shard` makes subclasses of FSDPModule
        return
    for model in (model for ref in models if (model := ref()) is not None):
        if "_amp" in vars(model) and is_fsdp(model):
            raise RuntimeError(
                f"{caller}: fully_shard was called on this {type(model).__name__} after initialize() and put other "
                "parameters in place of those that the optimizer and its masters hold; call fully_shard first, with "
                "mp_policy=amp.fsdp_policy(opt_level), then make the optimizer, then call initialize()"
            )


def targets_of(optimizers: Any, caller: str = "scale_loss") -> list[Any]:
    """Return the innermost optimizers, each once; raise if one did not go through `initialize`."""
    if ATTRIBUTE in getattr(optimizers, "__dict__", ()):  # one optimizer, without a wrapper
        return [optimizers]
    targets: list[Any] = []
    wrappers = []
    for optimizer in as_list(optimizers):
        target = innermost(optimizer)
        if stash_of(target) is None:
            groups_of(target, caller)  # raises TypeError if `optimizer` is no optimizer
            raise RuntimeError(
                f"{caller}: this {type(target).__name__} never went through initialize(); call "
                "`model, optimizer = amp.initialize(model, optimizer, opt_level=...)` first"
            )
        if all(target is not known for known in targets):
            targets.append(target)
        if optimizer is not target:  # a wrapper, which may be newer than `initialize`: notify guests
            wrappers.append(optimizer)
    if not targets:
        raise TypeError(f"{caller}: optimizers is empty; wanted the optimizer of this loss, or a list of optimizers")
    for wrapper in wrappers:
        joints.tell(joints.wrapped, wrapper)
    return targets


def groups_of(optimizer: object, caller: str) -> Any:
    """Return the param groups of the innermost optimizer; raise TypeError if there are none (a model was passed)."""
    groups = getattr(innermost(optimizer), "param_groups", None)
    if groups is None:
        raise TypeError(
            f"{caller}: got a {base_class(optimizer).__name__} for an optimizer; wanted the optimizer that went "
            f"through initialize(), as in `amp.{caller}({'loss, ' if caller == 'scale_loss' else ''}optimizer)`"
        )
    return groups


def scaler_of(stash: Stash, loss_id: int, caller: str = "scale_loss") -> LossScaler:
    count = len(stash.scalers)
    if isinstance(loss_id, bool) or not isinstance(loss_id, int) or not 0 <= loss_id < count:
        more = type(loss_id) is int and loss_id > 0
        way_out = f"give initialize num_losses={loss_id + 1}" if more else f"wanted an integer from 0 to {count - 1}"
        raise ValueError(f"{caller}: loss_id is {loss_id!r}, and initialize was given num_losses={count}; {way_out}")
    return stash.scalers[loss_id]


def loss_scale(optimizers: Optimizers, loss_id: int = 0) -> Tensor:
    """Return the factor of `scale_loss(loss, optimizers, loss_id)`, for gradients of `torch.autograd.grad`::

        scale = amp.loss_scale(optimizer)
        scaled = torch.autograd.grad(loss * scale, inputs, create_graph=True)
        grads = [grad.float() / scale for grad in scaled]

    `scale_loss` unscales `.grad` alone. Without the scale, small FP16 gradients underflow to 0. Gradients that
    overflowed stay infinite after the division, and a loss computed from them skips its step.

    Args:
        optimizers: the optimizer of the loss, or a list of its optimizers.
        loss_id: the index of the loss scale, below `initialize(num_losses=...)`.

    Returns:
        A copy of the scale, FP32, shape [], on the device of the newest loss (the CPU before the first). It does not
        change when the scale does. 1 if the level does not scale. Does not sync.

    Raises:
        RuntimeError: an optimizer did not go through `initialize`.
        ValueError: there is no such loss_id.
    """
    stashes = [stash_of(target) for target in targets_of(optimizers, "loss_scale")]
    stash = next((stash for stash in stashes if stash is not None and stash.enabled), None)
    if stash is None:
        return torch.ones((), dtype=torch.float32, device="cpu")
    return Pending(scaler_of(stash, loss_id, "loss_scale")).scale

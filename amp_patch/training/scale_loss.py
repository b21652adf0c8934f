"""`scale_loss`: one scaled backward pass; and `loss_scale`, what it multiplies by."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.support import compiled
from amp_patch.support.fsdp import refuse_sharded_since
from amp_patch.support.generated_class import base_class
from amp_patch.training import joints, slips
from amp_patch.training.arguments import Optimizers
from amp_patch.training.innermost import as_list, innermost
from amp_patch.training.loss_scaler import LossScaler
from amp_patch.training.scaled_backward import ScaledBackward
from amp_patch.training.stash import Stash, known_stash, stash_of


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

    In the body the model's gradients are the raw scaled ones of this backward, and of delayed ones before it. The exit
    unscales them into the masters' gradients (FP32; added to what earlier exits left, which was away meanwhile and is
    not checked again), and records on the device what overflowed. From then on `param.grad` of a cast parameter is its
    master's. Nothing here waits for the device. `optimizer.step()` then skips on overflow, which costs one sync; none
    with an optimizer that skips on the device itself: torch's `fused=True`, FusedSGD, FusedAdam(capturable=True).

    Args:
        loss: a floating tensor, any shape.
        optimizers: the optimizer, or a list of those, whose gradients this backward makes.
        loss_id: which scale, below `initialize(num_losses=...)`.
        model: unused; Apex has it.
        delay_unscale: leave the gradients scaled where they are, for the next micro-batch to add to. The last
            micro-batch of an iteration has it False. (A step with gradients still scaled unscales them itself.)
            Autograd adds them in the type of the weights: in BF16 (O5) the sum of 64 micro-batches was 0.8 % off, that
            of 512 4 to 7 %; in FP16 0.1 and 0.3 %. Where it is False each exit adds in FP32 at O2 and O5.
            Implied where DistributedDataParallel's `no_sync()` was around the forward of a model that is cast, or whose
            loss is scaled: the sum stays on the model until DDP reduces it, and all processes see an overflow at once.
            Implied where fully_shard holds gradients back (`set_requires_gradient_sync(False)`).
        delay_overflow_check: unscale, but leave moving the scale to a later exit of this `loss_id`. The optimizer
            skips all the same if it overflowed.

    Returns:
        A context manager that gives the loss times the scale, FP32 (FP64 for an FP64 loss); `loss` itself where the
        level does not scale.

    Raises:
        RuntimeError: an optimizer that `initialize` never saw; or, from `optimizer.step()` in the body, that it belongs
            after it. (At O0 and O4 without `skip_nonfinite` an optimizer may step there, in a hook of backward too.)
            Where the loss is scaled: backward of the loss itself in the body, or of the scaled loss after it; a loss
            that a GradScaler has scaled.
        TypeError, ValueError: a loss, optimizer or loss_id that cannot be. Gradients are untouched then.

    Warns, once, where the loss depends on no parameter of `optimizers`.

    An exception in the body leaves no scaled gradient, and scale and earlier gradients as they were. What may clear
    gradients inside the body is `zero_grad()` of the optimizer or of the model given to `initialize`.
    """
    targets, stashes = [], []
    for target in targets_of(optimizers):
        stash = known_stash(target)
        if stash.enabled:
            targets.append(target)
            stashes.append(stash)
    if not targets:
        return nullcontext(loss)
    scaler = _checked_scaler(loss, stashes, loss_id)
    for target, stash in zip(targets, stashes, strict=True):
        stash.masters.of_groups(target.param_groups)  # which may come to subscribe, where the groups have changed
        for prepare in stash.neighbours.before_backward:
            prepare(target, stash)
    if scaler.scales and not stashes[0].bodies:
        slips.refuse_scaled(loss)
    alone = len(targets) == 1 and stashes[0].neighbours.owns_all
    return (ScaledBackward if alone else joints.shared_backward[0])(
        loss, targets, stashes, scaler, delay_unscale=delay_unscale, delay_overflow_check=delay_overflow_check
    )


def _checked_scaler(loss: Any, stashes: list[Stash], loss_id: int) -> LossScaler:
    """The scaler of `loss`, on its device; raises where `scale_loss` cannot go on with these arguments."""
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        came = f"a tensor of {loss.dtype}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise TypeError(f"scale_loss: loss is {came}; wanted a floating-point tensor")
    for stash in stashes:
        for ref in stash.neighbours.models:
            refuse_sharded_since(ref(), "scale_loss")
    return scaler_of(stashes[0], loss_id).to(loss.device)


def targets_of(optimizers: Any, caller: str = "scale_loss") -> list[Any]:
    """The innermost optimizers, each once."""
    targets: dict[int, Any] = {}
    wrappers = []
    for optimizer in as_list(optimizers):
        target = innermost(optimizer)
        if stash_of(target) is None:
            groups_of(target, caller)  # raises of what is no optimizer
            raise RuntimeError(
                f"{caller}: this {type(target).__name__} never went through initialize(); call "
                "`model, optimizer = amp.initialize(model, optimizer, opt_level=...)` first"
            )
        targets[id(target)] = target
        if optimizer is not target:  # `initialize` may have been given the one inside
            wrappers.append(optimizer)
    if not targets:
        raise TypeError(f"{caller}: optimizers is empty; wanted the optimizer, or a list of those, of this loss")
    for wrapper in wrappers:
        joints.tell(joints.wrapped, wrapper)
    return list(targets.values())


def groups_of(optimizer: Any, caller: str) -> Any:
    """The groups of the innermost optimizer; TypeError where there are none: a model was given, for one."""
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
    """What `scale_loss(loss, optimizers, loss_id)` multiplies by now, for gradients of `torch.autograd.grad`::

        scale = amp.loss_scale(optimizer)
        scaled = torch.autograd.grad(loss * scale, inputs, create_graph=True)
        grads = [grad.float() / scale for grad in scaled]

    `scale_loss` unscales `.grad` alone. Without the scale small FP16 gradients vanish on their way; gradients that
    overflowed stay infinite, and a loss made of them skips its step as ever.

    Args:
        optimizers: the optimizer, or a list of those, of the loss.
        loss_id: which scale, below `initialize(num_losses=...)`.

    Returns:
        FP32, shape [], on the device of the newest loss (the CPU before the first); a copy, which does not move with
        the scale. 1 where the level does not scale. Does not sync.

    Raises:
        RuntimeError: an optimizer that `initialize` never saw. ValueError: a loss_id that cannot be.
    """
    stashes = [stash_of(target) for target in targets_of(optimizers, "loss_scale")]
    stash = next((stash for stash in stashes if stash is not None and stash.enabled), None)
    if stash is None:
        return torch.ones((), dtype=torch.float32, device="cpu")
    return scaler_of(stash, loss_id, "loss_scale").scale_tensor.clone()

"""find_loss_scale: the smallest and the largest loss scale that are safe for a batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from amp_patch.casts import regions
from amp_patch.casts import state as casts_state
from amp_patch.diagnose.trial_forward import state_restored
from amp_patch.model.forward import policy_of
from amp_patch.policy import LOW_PRECISION
from amp_patch.support import distributed
from amp_patch.support.words import of_class

_LOWEST, _HIGHEST = -24, 120  # exponents of the scales that are tried


class LossScaleRange(NamedTuple):
    """Loss scales, powers of two, between which a batch's gradients neither overflow nor flush to zero.

    Attributes:
        lowest: the smallest scale at which no more elements of the parameters' gradients are 0 than at `highest`.
        highest: the largest scale at which all elements are finite.
    """

    lowest: float
    highest: float

    def __str__(self) -> str:
        low, high = (f"2**{round(math.log2(scale))} ({scale:g})" for scale in self)
        return f"loss scales from {low} to {high}"


def find_loss_scale(model: nn.Module, loss_fn: Callable[..., Tensor], batch: Any) -> LossScaleRange:
    """Find the range of static loss scales that are safe for this batch::

        amp.initialize(model, optimizer, opt_level="O2")
        print(amp.find_loss_scale(model, torch.nn.functional.cross_entropy, (inputs, targets)))
        # loss scales from 2**-4 (0.0625) to 2**15 (32768)

    Runs `loss_fn(model(*inputs), targets)` and its backward about sixteen times, by bisection, in the types of the
    model's opt level. An overflow in the gradient of an activation therefore counts too. Leave a margin below
    `highest`: other batches may have larger gradients. Parameters and gradients are not changed; buffers and the states
    of the random generators are restored. Syncs with the device.

    Args:
        model: the model that `initialize` returned. At a level without FP16 the range is FP32's or BF16's.
        loss_fn: takes the model's output and the targets, and returns a loss of one element.
        batch: (inputs, ..., targets). The targets go to `loss_fn`, all others to the model.

    Raises:
        TypeError: `model` is no module, `batch` no tuple or list of two or more, or the loss no tensor.
        ValueError: the loss is not one finite number, or depends on no parameter that requires grad; a gradient
            overflows even at a scale of 2**-24; the model is sharded, or does not compute in low precision.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"find_loss_scale: model is {of_class(model)}; wanted a torch.nn.Module")
    distributed.refuse(model, "find_loss_scale")
    if not isinstance(batch, list | tuple) or len(batch) < 2:
        raise TypeError(f"find_loss_scale: batch is {of_class(batch)}; wanted a tuple (inputs, ..., targets)")
    params = [param for param in model.parameters() if param.requires_grad]
    if not params:
        raise ValueError(f"find_loss_scale: no parameter of {type(model).__name__} requires grad")
    if policy_of(model) is None and not _has_low_precision(model):
        raise ValueError(
            f"find_loss_scale: this {type(model).__name__} is FP32 and not initialized, so it needs no loss "
            "scale: give it a level first, model, optimizer = amp.initialize(model, optimizer, opt_level='O1') or 'O2'"
        )

    def gradients(power: int) -> list[Tensor]:
        return _gradients(model, loss_fn, batch, params, 2.0**power)

    def finite(power: int) -> bool:
        return all(bool(torch.isfinite(grad).all()) for grad in gradients(power))

    def zeros(power: int) -> int:
        return sum(int((grad == 0).sum()) for grad in gradients(power))

    if not finite(_LOWEST):
        raise ValueError(
            f"find_loss_scale: a gradient of {type(model).__name__} overflows even at a loss scale of 2**{_LOWEST}; "
            "amp.inspect names the module"
        )
    highest = _last(finite, _LOWEST, _HIGHEST)
    fewest = zeros(highest)
    lowest = -_last(lambda negated: zeros(-negated) == fewest, -highest, -_LOWEST)
    return LossScaleRange(2.0**lowest, 2.0**highest)


def _has_low_precision(model: nn.Module) -> bool:
    """Return whether a model that never went through `initialize` computes in low precision.

    It does if its weights are in low precision, or inside of an autocast block.
    """
    casts = casts_state.current() is not None or any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
    return casts or any(param.dtype in LOW_PRECISION for param in model.parameters())


def _gradients(
    model: nn.Module, loss_fn: Callable[..., Tensor], batch: Any, params: list[nn.Parameter], scale: float
) -> list[Tensor]:
    """Return the gradients of `scale` times the loss, as a list of tensors. They are not added to `.grad`.

    Parameters on which the loss does not depend have no gradient in the list. A sparse gradient is given by its values.
    """
    *inputs, targets = batch
    with state_restored(model), regions.process_wide_region(policy_of(model)):
        loss = loss_fn(model(*inputs), targets)
        if not isinstance(loss, Tensor):
            raise TypeError(f"find_loss_scale: loss_fn returned {of_class(loss)}; wanted a tensor")
        if loss.numel() != 1 or not bool(torch.isfinite(loss)):
            raise ValueError(
                f"find_loss_scale: the loss has shape {list(loss.shape)} and values {loss.detach().tolist()}; "
                "wanted one finite number"
            )
        grads = []
        if loss.requires_grad:
            found = torch.autograd.grad((loss.float() * scale).reshape(()), params, allow_unused=True)
            grads = [grad.detach() for grad in found if grad is not None]
        if not grads:
            raise ValueError(
                "find_loss_scale: the loss does not depend on a parameter that requires grad; is something in "
                "the model or in loss_fn detached, or grad mode off?"
            )
        return [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]


def _last(holds: Callable[[int], bool], first: int, last: int) -> int:
    """Return the largest number from `first` to `last` for which `holds` returns True, by bisection.

    `holds` must return True for `first`. If it returns False for a number, it must do so for all larger numbers.
    """
    while first < last:
        middle = (first + last + 1) // 2
        first, last = (middle, last) if holds(middle) else (first, middle - 1)
    return first

"""Steps of Adam and SGD in plain torch, without a sync.

`adam` and `sgd` are the kernels `multi_tensor_adam` and `multi_tensor_sgd`, for devices that the extension is not built
for. They are called after the checks, like the kernels in plain.py.

`fused_adam` and `fused_sgd` serve the optimizers of `amp_patch.optimizers`. They call torch's fused functions, which
change FP32 or FP64 lists in place, on devices that have such a function. These round in another order than the kernels,
and compute the weight decay differently, so the last bits of the results may differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_patch.multi_tensor.checks import Number, Tensors
from amp_patch.multi_tensor.plain import adopt
from amp_patch.multi_tensor.plain_codes import decoded, encode_back
from amp_patch.multi_tensor.plain_random import stochastically_rounded
from amp_patch.support.devices import widest

# ---------------------------------------------------------------------------------------------------------------------
# The kernels, on any device


def _gradients(grads: Tensors, factors: Sequence[Number], maximize: bool) -> list[Tensor]:
    wide = [grad.float() for grad in grads]
    for factor in factors:
        number = factor.reshape(()).float() if isinstance(factor, Tensor) else float(factor)
        wide = list(torch._foreach_mul(wide, number))
    return list(torch._foreach_neg(wide)) if maximize else wide


def _number(value: Number, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `value` as a tensor of shape [] on the device of `like`.

    `torch.full` makes it on the device. A copy from the host would sync, and could not be captured in a CUDA graph.
    """
    if isinstance(value, Tensor):
        return value.to(device=like.device, dtype=dtype).reshape(())
    return torch.full((), float(value), dtype=dtype, device=like.device)


def bias_divisor(beta: float, count: Number) -> Number:
    """Return `1 - beta ** count`: a float, or for a tensor a tensor of type `widest`; no sync."""
    if not isinstance(count, Tensor):
        return 1 - beta**count
    if widest(count.device) is torch.float64:
        return 1 - beta ** count.double()
    # For a beta near 1 the difference would lose most of FP32's bits. 1e-300 replaces 0, which has no logarithm.
    return -torch.expm1(count.float() * math.log(max(beta, 1e-300)))


def _times_each(tensors: Tensors, numbers: Number) -> list[Tensor]:
    """Return each tensor times `numbers`, or tensor i times element i of a 1-D tensor of numbers, in FP32; no sync."""
    if not isinstance(numbers, Tensor):
        return list(torch._foreach_mul(list(tensors), float(numbers)))
    if numbers.device != tensors[0].device:  # the CPU: the host reads it
        return list(torch._foreach_mul(list(tensors), numbers.tolist()))
    each = numbers.float().reshape(-1).expand(len(tensors)).unbind()
    return [t * number for t, number in zip(tensors, each, strict=True)]


def _write(targets: Sequence[Tensor], values: Sequence[Tensor], found_inf: Tensor | None) -> None:
    """Copy the values into the targets, unless found_inf is raised; no sync."""
    for target, value in zip(targets, values, strict=True):
        if found_inf is None:
            target.copy_(value)
        else:
            target.copy_(torch.where(found_inf.reshape(()) == 0, value, target))


def _masters(params: Tensors, low: Tensors) -> list[Tensor]:
    """Return FP32 copies of the masters that `params` and the weights `low` describe.

    A split master is joined. A whole master adopts edits of its weight. A bfloat16 param is a weight without master,
    and is cast.
    """
    masters = [param.float() if param.dtype is torch.bfloat16 else param.clone() for param in params]
    for i, weight in enumerate(low):
        if params[i].dtype == torch.int16:
            masters[i] = _joined(weight, params[i])
        else:
            adopt([weight], [masters[i]])
    return masters


def _joined(weight: Tensor, half: Tensor) -> Tensor:
    high = weight.view(torch.int16).int() << 16
    master = (high + half.int()).view(torch.float32)
    ignores_half = (high << 1 == 0) | master.isnan()  # as `join` in csrc/kernels/steps.h, which has the reasons
    return torch.where(ignores_half, high.view(torch.float32), master)


def _halved(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return (BF16 weight, int16 low half) of an FP32 master."""
    bits = torch.where(master.isnan(), 0x7FC00000, master.view(torch.int32))
    half = bits.to(torch.int16)  # the low 16 bits
    return ((bits - half.int()) >> 16).to(torch.int16).view(torch.bfloat16), half


def split(masters: Tensors, weights: Tensors, halves: Tensors) -> None:
    """`multi_tensor_split`: splits FP32 `masters` into BF16 `weights` and int16 `halves`, in place."""
    for master, weight, half in zip(masters, weights, halves, strict=True):
        for target, value in zip((weight, half), _halved(master), strict=True):
            target.copy_(value)


def join(weights: Tensors, halves: Tensors, masters: Tensors) -> None:
    """`multi_tensor_join`: joins BF16 `weights` and int16 `halves` into FP32 `masters`, in place."""
    for weight, half, master in zip(weights, halves, masters, strict=True):
        master.copy_(_joined(weight, half))


def stochastic_round(masters: Tensors, weights: Tensors, seed: int, draws: Sequence[int]) -> None:
    """`multi_tensor_stochastic_round`: rounds FP32 `masters` into BF16 `weights`, in place."""
    for i, weight in enumerate(weights):
        weight.copy_(stochastically_rounded(masters[i], weight, seed, draws[i]))


def _published(
    params: Tensors, low: Tensors, masters: list[Tensor], seed: int, draws: Sequence[int]
) -> list[tuple[Tensors, Tensors]]:
    """Return two pairs (targets, values): where the caller must store stepped masters, and what.

    The first pair has `params` as targets. A value is the master itself, its low half for an int16 parameter, or the
    master rounded stochastically for a bfloat16 parameter. The second pair has `low` as targets, and the weights.
    """
    values, weights = list(masters), list(masters)
    for i, param in enumerate(params):
        if param.dtype == torch.int16:
            weights[i], values[i] = _halved(masters[i])
        elif param.dtype == torch.bfloat16:
            values[i] = stochastically_rounded(masters[i], param, seed, draws[i])
    return [(params, values), (low, weights if low else ())]


def adam(
    grads: Tensors,
    params: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    steps: Tensors,
    low: Tensors,
    average_scales: Tensors,
    square_scales: Tensors,
    lr: Number,
    count: Number,
    factors: Sequence[Number],
    found_inf: Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    maximize: bool,
    bias_correction: bool,
    seed: int,
    draws: Sequence[int],
) -> None:
    """`multi_tensor_adam`: changes params, averages, `steps` and `low` in place if `found_inf` is 0; no sync."""
    if not params:
        return
    g, p = _gradients(grads, factors, maximize), _masters(params, low)
    rate = lr.reshape(()).to(widest(lr.device)) if isinstance(lr, Tensor) else lr
    if decoupled:
        p = _times_each(p, 1 - rate * weight_decay)
    elif weight_decay:
        g = list(torch._foreach_add(g, p, alpha=weight_decay))
    counts = (torch.stack([step.reshape(()) for step in steps]) if steps else count) + 1
    if isinstance(rate, Tensor) and isinstance(counts, Tensor):
        counts = counts.to(rate.device)
    first, second = (bias_divisor(beta, counts) if bias_correction else 1.0 for beta in (beta1, beta2))

    averages, squares = decoded(exp_avgs, average_scales), decoded(exp_avg_sqs, square_scales)
    m = list(torch._foreach_lerp(averages, g, 1 - beta1))
    v = list(torch._foreach_mul(squares, beta2))
    torch._foreach_addcmul_(v, g, g, 1 - beta2)
    max_v = list(torch._foreach_maximum(list(max_exp_avg_sqs), v)) if max_exp_avg_sqs else []
    denominators = _times_each(torch._foreach_sqrt(max_v or v), second**-0.5)
    torch._foreach_add_(denominators, eps)
    torch._foreach_addcdiv_(p, _times_each(m, -rate / first), denominators)
    lists: list[tuple[Tensors, Tensors]]
    lists = [(averages, m), (squares, v), (max_exp_avg_sqs, max_v), (steps, [step + 1 for step in steps])]
    for targets, values in [*lists, *_published(params, low, p, seed, draws)]:
        _write(targets, values, found_inf)
    encode_back(averages, exp_avgs, average_scales)
    encode_back(squares, exp_avg_sqs, square_scales)


def sgd(
    grads: Tensors,
    params: Tensors,
    momentum_buffers: Tensors,
    low: Tensors,
    momentum_scales: Tensors,
    lr: Number,
    factors: Sequence[Number],
    found_inf: Tensor | None,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    maximize: bool,
    first_run: bool,
    seed: int,
    draws: Sequence[int],
) -> None:
    """`multi_tensor_sgd`: changes params, momentum buffers and `low` in place if `found_inf` is 0; no sync."""
    if not params:
        return
    g, p = _gradients(grads, factors, maximize), _masters(params, low)
    if weight_decay:
        g = list(torch._foreach_add(g, p, alpha=weight_decay))
    buffers: list[Tensor] = []
    before = decoded(momentum_buffers, momentum_scales)
    if momentum:
        if first_run:
            buffers = [t.clone() for t in g]
        else:
            buffers = list(torch._foreach_mul(before, momentum))
            torch._foreach_add_(buffers, g, alpha=1 - dampening)
        g = list(torch._foreach_add(g, buffers, alpha=momentum) if nesterov else buffers)
    p = list(torch._foreach_sub(p, _times_each(g, lr)))
    for targets, values in [(before, buffers), *_published(params, low, p, seed, draws)]:
        _write(targets, values, found_inf)
    encode_back(before, momentum_buffers, momentum_scales)


# ---------------------------------------------------------------------------------------------------------------------
# Calls of torch's fused functions. The tensors at one index of all lists must have the same strides: torch's functions
# do not check this, and would combine the wrong elements.

# A step count at which the bias correction `1 - beta ** count` is 1 for every beta below 1.
_FOREVER = 1e30


def decay(params: list[Tensor], rate: Number, found_inf: Tensor | None = None) -> None:
    """Compute `params -= rate * params` in place, unless `found_inf` is not 0; no sync.

    torch computes `params *= 1 - rate`, which is less exact: FP32 rounds the factor `1 - rate` the same way at every
    step, so the errors add up.
    """
    if found_inf is None and not isinstance(rate, Tensor):
        torch._foreach_add_(params, params, alpha=-rate)
        return
    there = _number(rate, params[0], params[0].dtype)
    if found_inf is not None:
        there = torch.where(found_inf.reshape(()) != 0, 0.0, there)
    torch._foreach_sub_(params, torch._foreach_mul(params, there))


def fused_adam(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    step: int,
    lr: Number,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
) -> None:
    """Make a step of Adam (Kingma and Ba, arXiv:1412.6980) in place, or of AdamW (arXiv:1711.05101) if `decoupled`::

        m = beta1 * m + (1 - beta1) * g         m' = m / (1 - beta1 ** step)
        v = beta2 * v + (1 - beta2) * g * g     v' = v / (1 - beta2 ** step)
        p = p - lr * (m' / (sqrt(v') + eps) + weight_decay * p)

    If not `decoupled`, `weight_decay * p` is added to g instead. Without `bias_correction`, m' is m and v' is v. All
    lists are on one device; params, exp_avgs and exp_avg_sqs are written. No sync.
    """
    if not params:
        return
    count = _number(step if bias_correction else _FOREVER, params[0], torch.float32)
    if decoupled and weight_decay:
        decay(params, lr * weight_decay)
    torch._fused_adam_(
        *(params, grads, exp_avgs, exp_avg_sqs, [], [count] * len(params)),
        lr=lr.reshape(()) if isinstance(lr, Tensor) else lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=0.0 if decoupled else weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )


def fused_sgd(
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor],
    *,
    lr: Number,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    wd_after_momentum: bool,
    first_run: bool,
    found_inf: Tensor | None = None,
) -> None:
    """Make a step of SGD in place, with torch.optim.SGD's formulas::

        g = g + weight_decay * p
        b = momentum * b + (1 - dampening) * g      # b = g on a `first_run`
        p = p - lr * b                              # p = p - lr * (g + momentum * b) if `nesterov`

    With `wd_after_momentum` (Apex's option), `weight_decay * p` is not added to g, but to the update that lr
    multiplies. Without momentum, g replaces b, and `momentum_buffers` is empty. All lists are on one device; params and
    buffers are written. `found_inf` is a float32 tensor of one element there: if it is 1, nothing changes. No sync.
    """
    if not params:
        return
    if weight_decay and wd_after_momentum:
        decay(params, lr * weight_decay, found_inf)
    torch._fused_sgd_(
        *(params, grads, momentum_buffers),
        weight_decay=0.0 if wd_after_momentum else weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=dampening,
        nesterov=nesterov,
        maximize=False,
        is_first_step=first_run and bool(momentum_buffers),  # on CUDA torch warns if there is no momentum to initialize
        found_inf=found_inf,
    )

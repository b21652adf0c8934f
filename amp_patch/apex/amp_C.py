"""Apex's compiled module `amp_C`: its multi-tensor functions over `amp_patch.multi_tensor` and the fused optimizers.

Each takes `(chunk_size, noop_flag, tensor_lists, *arguments)`, as `multi_tensor_applier` calls it and as callers do by
themselves, in Apex's order. `chunk_size` is of no account here. `noop_flag` is a tensor of one element, int32
(`torch.cuda.IntTensor([0])`) or another number type: it is set to 1 where Apex sets it, on what is not finite, and also
where a finite element overflows in its new type. Where Apex's function does nothing once the flag is set
(`multi_tensor_sgd` and the capturable Adams), nothing is written. No function syncs with the device; all of them write
to tensors that require grad, as Apex's do.

Gradients are only read: Apex's `multi_tensor_lamb` puts the update into them, its capturable Adams what they unscale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.optimizers.adagrad import adagrad
from amp_patch.optimizers.adam import adam
from amp_patch.optimizers.common import computable, wide
from amp_patch.optimizers.lamb import lamb, lamb_apply, lamb_update
from amp_patch.optimizers.novograd import NORMS, blend_norms, norms_of, novograd
from amp_patch.optimizers.sgd import sgd

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_lamb",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_norm_out",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]

Lists = Sequence[Sequence[Tensor]]
_CHECK: dict[int, Literal["both", "x", "y"]] = {-1: "both", 0: "x", 1: "y"}


def _lists(name: str, lists: Lists, *wanted: str) -> list[list[Tensor]]:
    """The lists, which must be as many as `wanted` names, each as long as the first."""
    given = [list(tensors) for tensors in lists]
    if len(given) != len(wanted) or len({len(tensors) for tensors in given}) > 1:
        raise ValueError(
            f"{name}: tensor_lists holds lists of {[len(tensors) for tensors in given]} tensors, wanted are "
            f"{len(wanted)} lists of one length: {', '.join(wanted)}"
        )
    return given


def _flag(name: str, noop_flag: Any) -> Tensor:
    """The flag, of shape [1], sharing its memory."""
    if not isinstance(noop_flag, Tensor) or noop_flag.numel() != 1:
        raise TypeError(
            f"{name}: noop_flag is {noop_flag!r}, a tensor of one element is wanted: torch.cuda.IntTensor([0])"
        )
    return noop_flag.view(1)


@contextmanager
def _raising(name: str, noop_flag: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """A `found_inf` for the kernels on the tensors' device, from which the flag is set at the end."""
    flag = _flag(name, noop_flag)
    found_inf = torch.zeros((), device=tensors[0].device if tensors else flag.device)
    yield found_inf
    flag.masked_fill_(found_inf.to(flag.device) != 0, 1)


def _is_set(name: str, noop_flag: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """1.0 where the flag is set, else 0.0, on the tensors' device: what torch's fused kernels skip by."""
    flag = _flag(name, noop_flag) != 0
    return flag.to(device=tensors[0].device if tensors else flag.device, dtype=torch.float32)


def _publish(masters: Sequence[Tensor], copies: Sequence[Tensor], skipped: Tensor) -> None:
    for master, copy in zip(masters, copies, strict=True):
        copy.copy_(torch.where(skipped != 0, copy, master.to(copy.dtype)))


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float | Tensor) -> None:
    """`dst = src * scale` for the lists [src, dst]; sets the flag."""
    src, dst = _lists("multi_tensor_scale", tensor_lists, "src", "dst")
    with _raising("multi_tensor_scale", noop_flag, src) as found_inf:
        multi_tensor.multi_tensor_scale(src, dst, scale, found_inf)


@torch.no_grad()
def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    a: float | Tensor,
    b: float | Tensor,
    arg_to_check: int = -1,
) -> None:
    """`out = a * x + b * y` for the lists [x, y, out]; sets the flag by both (-1), by x (0) or by y (1)."""
    x, y, out = _lists("multi_tensor_axpby", tensor_lists, "x", "y", "out")
    if arg_to_check not in _CHECK:
        raise ValueError(f"multi_tensor_axpby: arg_to_check={arg_to_check!r}, wanted -1 (both), 0 (x) or 1 (y)")
    with _raising("multi_tensor_axpby", noop_flag, x) as found_inf:
        multi_tensor.multi_tensor_axpby(a, x, b, y, out, found_inf, check=_CHECK[arg_to_check])


def _norms(name: str, noop_flag: Tensor, x: list[Tensor], per_tensor: bool | None) -> tuple[Tensor, Tensor]:
    flag = _flag(name, noop_flag)
    if not x:
        return torch.zeros(1, device=flag.device), torch.zeros(0, device=flag.device)
    total, each = multi_tensor.multi_tensor_l2norm(x, per_tensor=True)
    flag.masked_fill_(~total.isfinite().to(flag.device), 1)
    return total.reshape(1), each if per_tensor else each[:0]


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """The 2-norm of [x], shape [1], and of each tensor, shape [len(x)] (else [0]); sets the flag if not finite."""
    (x,) = _lists("multi_tensor_l2norm", tensor_lists, "x")
    return _norms("multi_tensor_l2norm", noop_flag, x, per_tensor)


@torch.no_grad()
def multi_tensor_l2norm_mp(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """`multi_tensor_l2norm`, under the name that Apex has for it with bfloat16."""
    (x,) = _lists("multi_tensor_l2norm_mp", tensor_lists, "x")
    return _norms("multi_tensor_l2norm_mp", noop_flag, x, per_tensor)


@torch.no_grad()
def multi_tensor_l2norm_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """The norms of src as `multi_tensor_l2norm` has them, and `dst = src * scale`, for the lists [src, dst]."""
    src, dst = _lists("multi_tensor_l2norm_scale", tensor_lists, "src", "dst")
    norms = _norms("multi_tensor_l2norm_scale", noop_flag, src, per_tensor)  # dst may be src
    multi_tensor.multi_tensor_scale(src, dst, scale)
    return norms


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, inv_scale: Tensor, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """The norms of `x * inv_scale` as `multi_tensor_l2norm` has them; x is only read. `inv_scale`: one element."""
    (x,) = _lists("multi_tensor_unscale_l2norm", tensor_lists, "x")
    unscaled = [torch.empty_like(t, dtype=wide(t.dtype)) for t in x]
    if x:
        multi_tensor.multi_tensor_scale(x, unscaled, torch.as_tensor(inv_scale, device=x[0].device).float().reshape(()))
    return _norms("multi_tensor_unscale_l2norm", noop_flag, unscaled, per_tensor)


@torch.no_grad()
def multi_tensor_norm_out(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, out: Tensor, alpha: float, beta: float, norm_type: int
) -> None:
    """Blend the norm of each tensor of [x] into `out`, shape [len(x)], in place; sets the flag if one is not finite.

    `out = sqrt(alpha * out**2 + beta * norm**2)` for the 2-norm (norm_type 2), `alpha * out + beta * norm` for the
    largest absolute value (0).
    """
    (x,) = _lists("multi_tensor_norm_out", tensor_lists, "x")
    _blend("multi_tensor_norm_out", noop_flag, x, out, alpha, beta, norm_type)


def _blend(
    name: str, noop_flag: Tensor, x: list[Tensor], out: Tensor, alpha: float, beta: float, norm_type: int
) -> None:
    if norm_type not in NORMS:
        raise ValueError(f"{name}: norm_type={norm_type!r}, wanted 2 (the 2-norm) or 0 (the largest absolute value)")
    if out.shape != (len(x),):
        raise ValueError(f"{name}: the norms have shape {list(out.shape)}, [{len(x)}] is wanted, one for each tensor")
    if not x:
        return
    flag, norms = _flag(name, noop_flag), norms_of(x, norm_type)
    flag.masked_fill_(~norms.isfinite().all().to(flag.device), 1)
    out.copy_(blend_norms(out.to(norms), norms, alpha, beta, norm_type))


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float = 1.0,
) -> None:
    """A step of SGD for the lists [grads, params, momentum buffers] or with low-precision copies of params as a fourth.

    Gradients are multiplied by `scale` first. Nothing is written where the flag is set.
    """
    name = "multi_tensor_sgd"
    wanted = ("grads", "params", "momentum_buffers", "copies")
    grads, params, buffers, *copies = _lists(name, tensor_lists, *wanted[: max(3, min(len(tensor_lists), 4))])
    skipped = _is_set(name, noop_flag, params)
    if scale != 1.0:
        scaled = [torch.empty_like(g, dtype=wide(p.dtype)) for g, p in zip(grads, params, strict=True)]
        multi_tensor.multi_tensor_scale(grads, scaled, scale)
        grads = scaled
    sgd(
        params,
        grads,
        buffers,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=wd,
        nesterov=nesterov,
        wd_after_momentum=wd_after_momentum,
        first_run=first_run,
        found_inf=skipped,
    )
    if copies:
        _publish(params, copies[0], skipped)


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """A step of Adam (mode 0) or AdamW (mode 1) for the lists [grads, params, exp_avgs, exp_avg_sqs]."""
    grads, params, *states = _lists("multi_tensor_adam", tensor_lists, "grads", "params", "exp_avgs", "exp_avg_sqs")
    adam(
        params,
        grads,
        *states,
        step=step,
        lr=lr,
        betas=(beta1, beta2),
        eps=epsilon,
        weight_decay=weight_decay,
        decoupled=mode == 1,
        bias_correction=bool(bias_correction),
    )


def _adam_capturable(name: str, noop_flag: Tensor, lists: list[list[Tensor]], *rest: Any) -> Tensor:
    grads, params, exp_avgs, exp_avg_sqs = lists
    lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay, inv_scale = rest
    skipped = _is_set(name, noop_flag, params)
    unscaled = [torch.empty_like(g, dtype=wide(p.dtype)) for g, p in zip(grads, params, strict=True)]
    multi_tensor.multi_tensor_scale(grads, unscaled, inv_scale)
    adam(
        params,
        unscaled,
        exp_avgs,
        exp_avg_sqs,
        step=step,
        lr=lr,
        betas=(beta1, beta2),
        eps=epsilon,
        weight_decay=weight_decay,
        decoupled=mode == 1,
        bias_correction=bool(bias_correction),
        found_inf=skipped,
    )
    return skipped


@torch.no_grad()
def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """`multi_tensor_adam` of gradients times `inv_scale`, with lr, step and inv_scale tensors on the device.

    Nothing is written where the flag is set.
    """
    name = "multi_tensor_adam_capturable"
    lists = _lists(name, tensor_lists, "grads", "params", "exp_avgs", "exp_avg_sqs")
    numbers = (lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay, inv_scale)
    _adam_capturable(name, noop_flag, lists, *numbers)


@torch.no_grad()
def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """`multi_tensor_adam_capturable` of masters: the lists are [grads, params, exp_avgs, exp_avg_sqs, masters].

    Masters are rounded into params.
    """
    name = "multi_tensor_adam_capturable_master"
    wanted = ("grads", "params", "exp_avgs", "exp_avg_sqs", "masters")
    grads, params, exp_avgs, exp_avg_sqs, masters = _lists(name, tensor_lists, *wanted)
    numbers = (lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay, inv_scale)
    skipped = _adam_capturable(name, noop_flag, [grads, masters, exp_avgs, exp_avg_sqs], *numbers)
    _publish(masters, params, skipped)


@torch.no_grad()
def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    epsilon: float,
    mode: int,
    weight_decay: float,
) -> None:
    """A step of Adagrad for the lists [grads, params, sums]; weight decay in the gradient (mode 0) or apart (1)."""
    grads, params, sums = _lists("multi_tensor_adagrad", tensor_lists, "grads", "params", "sums")
    adagrad(params, grads, sums, lr=lr, eps=epsilon, weight_decay=weight_decay, decoupled=mode == 1)


@torch.no_grad()
def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    grad_norms: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    norm_type: int,
) -> None:
    """A step of NovoGrad for the lists [grads, params, exp_avgs]; `grad_norms`, shape [len(params)], is written too.

    Mode 0 divides by the norm and adds the weight decay inside the momentum, mode 1 after it. Sets the flag.
    """
    name = "multi_tensor_novograd"
    grads, params, exp_avgs = _lists(name, tensor_lists, "grads", "params", "exp_avgs")
    _blend(name, noop_flag, grads, grad_norms, beta2, 1 - beta2, norm_type)
    novograd(
        params,
        grads,
        exp_avgs,
        grad_norms,
        step=step,
        lr=lr,
        betas=(beta1, beta2),
        eps=epsilon,
        weight_decay=weight_decay,
        bias_correction=bool(bias_correction),
        grad_averaging=bool(grad_averaging),
        reg_inside_moment=mode == 0,
    )


@torch.no_grad()
def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: float,
    use_nvlamb: bool | None = None,
) -> None:
    """A step of LAMB for the lists [grads, params, exp_avgs, exp_avg_sqs], as FusedLAMB takes it."""
    grads, params, *states = _lists("multi_tensor_lamb", tensor_lists, "grads", "params", "exp_avgs", "exp_avg_sqs")
    lamb(
        params,
        grads,
        *states,
        step=step,
        lr=lr,
        betas=(beta1, beta2),
        eps=epsilon,
        weight_decay=weight_decay,
        decoupled=mode == 1,
        bias_correction=bool(bias_correction),
        grad_averaging=bool(grad_averaging),
        grad_norm=global_grad_norm,
        max_grad_norm=max_grad_norm,
        use_nvlamb=bool(use_nvlamb),
    )


@torch.no_grad()
def multi_tensor_lamb_stage1_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    per_tensor_decay: Tensor,
    step: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    global_grad_norm: Tensor,
    max_global_grad_norm: float,
) -> None:
    """LAMB's direction into updates, for the lists [grads, params, exp_avgs, exp_avg_sqs, updates].

    `per_tensor_decay` has shape [len(params)]; steps are counted from 0 here.
    """
    wanted = ("grads", "params", "exp_avgs", "exp_avg_sqs", "updates")
    grads, params, exp_avgs, exp_avg_sqs, updates = _lists("multi_tensor_lamb_stage1_cuda", tensor_lists, *wanted)
    if not params:
        return
    with computable([params, exp_avgs, exp_avg_sqs], [grads]) as ((p, m, v), (g,)):
        directions = lamb_update(
            p,
            g,
            m,
            v,
            corrections=(1 - beta1 ** (step + 1), 1 - beta2 ** (step + 1)),
            betas=(beta1, beta2),
            eps=epsilon,
            weight_decay=0.0,
            decoupled=True,
            grad_averaging=True,
            grad_norm=global_grad_norm,
            max_grad_norm=max_global_grad_norm,
            decays=per_tensor_decay,
        )
    multi_tensor.multi_tensor_scale(directions, updates, 1.0)


@torch.no_grad()
def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    per_tensor_param_norm: Tensor,
    per_tensor_update_norm: Tensor,
    lr: float,
    weight_decay: float = 0.0,
    use_nvlamb: bool | None = None,
) -> None:
    """`p -= lr * ratio * update` for the lists [params, updates], with norms of shape [len(params)] each.

    The ratio is 1 without weight decay unless `use_nvlamb`.
    """
    params, updates = _lists("multi_tensor_lamb_stage2_cuda", tensor_lists, "params", "updates")
    if not params:
        return
    with computable([params], []) as ((p,), _):
        mine = [torch.empty_like(t) for t in p]
        multi_tensor.multi_tensor_scale(updates, mine, 1.0)
        norms = (per_tensor_param_norm, per_tensor_update_norm) if use_nvlamb or weight_decay else None
        lamb_apply(p, mine, lr=lr, norms=norms)


@torch.no_grad()
def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """`amp_patch.multi_tensor.update_scale` without bounds, in place; returns `current_scale`."""
    multi_tensor.update_scale(
        current_scale,
        growth_tracker,
        found_inf,
        growth_factor,
        backoff_factor,
        growth_interval,
        hysteresis=max(hysteresis, 1),
        hysteresis_tracker=hysteresis_tracker,
    )
    return current_scale

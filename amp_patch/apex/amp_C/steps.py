"""The functions of `amp_C` that make a step of an optimizer."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.apex.amp_C.arguments import Lists, lists_of, multiplied, publish_unless, skip_flag
from amp_patch.apex.amp_C.tensor_lists import blend_into
from amp_patch.multi_tensor.plain_steps import fused_adam, fused_sgd
from amp_patch.optimizers.adagrad import adagrad
from amp_patch.optimizers.common import computable
from amp_patch.optimizers.lamb import lamb, lamb_apply, lamb_update
from amp_patch.optimizers.novograd import novograd

__all__ = ["multi_tensor_adagrad", "multi_tensor_adam", "multi_tensor_adam_capturable"]
__all__ += ["multi_tensor_adam_capturable_master", "multi_tensor_lamb", "multi_tensor_lamb_stage1_cuda"]
__all__ += ["multi_tensor_lamb_stage2_cuda", "multi_tensor_novograd", "multi_tensor_sgd"]


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
    """Make a step of SGD for the lists [grads, params, momentum buffers]. A fourth list has low-precision copies.

    Gradients are multiplied by `scale` first. The new params are rounded into their copies. If the flag is set, nothing
    is written.
    """
    name = "multi_tensor_sgd"
    wanted = ("grads", "params", "momentum_buffers", "copies")
    grads, params, buffers, *copies = lists_of(name, tensor_lists, *wanted[: max(3, min(len(tensor_lists), 4))])
    skipped = skip_flag(name, noop_flag, params)
    if scale != 1.0:
        grads = multiplied(grads, scale, like=params)
    with computable([params, *([buffers] if momentum else [])], [grads]) as ((p, *b), (g,)):
        fused_sgd(
            *(p, g, b[0] if b else []),
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
        publish_unless(params, copies[0], skipped)


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
    """Make a step of Adam (mode 0) or AdamW (mode 1) for the lists [grads, params, exp_avgs, exp_avg_sqs]."""
    grads, *written = lists_of("multi_tensor_adam", tensor_lists, "grads", "params", "exp_avgs", "exp_avg_sqs")
    with computable(written, [grads]) as ((p, m, v), (g,)):
        fused_adam(
            *(p, g, m, v),
            step=step,
            lr=lr,
            betas=(beta1, beta2),
            eps=epsilon,
            weight_decay=weight_decay,
            decoupled=mode == 1,
            bias_correction=bool(bias_correction),
        )


def multi_tensor_adam_capturable(*_: Any, **__: Any) -> NoReturn:
    """Raise: copies of Apex's FusedAdam read this name, and call it with `capturable=True` alone."""
    raise NotImplementedError(
        "multi_tensor_adam_capturable: not supported, since steps are counted on the host; use "
        "torch.optim.AdamW(..., fused=True, capturable=True), or capturable=False"
    )


multi_tensor_adam_capturable_master = multi_tensor_adam_capturable


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
    """Make a step of Adagrad for the lists [grads, params, sums].

    The weight decay is added to the gradient (mode 0), or decoupled from it (mode 1).
    """
    grads, params, sums = lists_of("multi_tensor_adagrad", tensor_lists, "grads", "params", "sums")
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
    """Make a step of NovoGrad for the lists [grads, params, exp_avgs]; sets the flag.

    `grad_norms`, the running norms of shape [len(params)], is updated in place. Mode 0 divides by the norm and adds the
    weight decay before the momentum, mode 1 after it.
    """
    name = "multi_tensor_novograd"
    grads, params, exp_avgs = lists_of(name, tensor_lists, "grads", "params", "exp_avgs")
    blend_into(name, noop_flag, grads, grad_norms, beta2, 1 - beta2, norm_type)
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
    """Make a step of LAMB, as FusedLAMB does, for the lists [grads, params, exp_avgs, exp_avg_sqs]."""
    grads, params, *states = lists_of("multi_tensor_lamb", tensor_lists, "grads", "params", "exp_avgs", "exp_avg_sqs")
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
    """Write LAMB's update into updates, for the lists [grads, params, exp_avgs, exp_avg_sqs, updates].

    `per_tensor_decay` has shape [len(params)]. `step` of the first step is 0, unlike in `multi_tensor_lamb`.
    """
    wanted = ("grads", "params", "exp_avgs", "exp_avg_sqs", "updates")
    grads, params, exp_avgs, exp_avg_sqs, updates = lists_of("multi_tensor_lamb_stage1_cuda", tensor_lists, *wanted)
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
    """Compute `p -= lr * ratio * update` in place for the lists [params, updates].

    The ratio is norm of the parameter / norm of the update; both arguments have the shape [len(params)]. If
    `weight_decay` is 0, the ratio is 1, unless `use_nvlamb`.
    """
    params, updates = lists_of("multi_tensor_lamb_stage2_cuda", tensor_lists, "params", "updates")
    if not params:
        return
    with computable([params], []) as ((p,), _):
        mine = [torch.empty_like(t) for t in p]
        multi_tensor.multi_tensor_scale(updates, mine, 1.0)
        norms = (per_tensor_param_norm, per_tensor_update_norm) if use_nvlamb or weight_decay else None
        lamb_apply(p, mine, lr=lr, norms=norms)

"""Apex's compiled module `amp_C`: its multi-tensor functions, made of `amp_patch.multi_tensor` and the optimizers.

Each function takes `(chunk_size, noop_flag, tensor_lists, *arguments)` in Apex's order, from `multi_tensor_applier` or
from user code. `chunk_size` is ignored. `noop_flag` is a tensor of one element, int32 (`torch.cuda.IntTensor([0])`) or
another number type. A function whose docstring says "sets the flag" writes 1 into it if an element is infinite or NaN,
as in Apex, and also if a finite element overflows in its new type. `multi_tensor_sgd` writes
nothing if the flag is set, as in Apex. No function syncs with the device. As in Apex, a tensor that requires grad may
be written.

Gradients are only read. (Apex's `multi_tensor_lamb` overwrites them with the update.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.multi_tensor.plain_steps import fused_adam, fused_sgd
from amp_patch.optimizers.common import computable, wide
from amp_patch.optimizers.lamb import lamb

__all__ = ["multi_tensor_adam", "multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master"]
__all__ += ["multi_tensor_axpby", "multi_tensor_l2norm", "multi_tensor_lamb", "multi_tensor_scale"]
__all__ += ["multi_tensor_sgd", "update_scale_hysteresis"]

Lists = Sequence[Sequence[Tensor]]

_CHECK: dict[int, Literal["both", "x", "y"]] = {-1: "both", 0: "x", 1: "y"}


def _lists_of(name: str, lists: Lists, *wanted: str) -> list[list[Tensor]]:
    """Return the lists. Raise unless there is one for each name in `wanted`, and all have one length."""
    given = [list(tensors) for tensors in lists]
    if len(given) != len(wanted) or len({len(tensors) for tensors in given}) > 1:
        raise ValueError(
            f"{name}: tensor_lists holds lists of {[len(tensors) for tensors in given]} tensors, wanted are "
            f"{len(wanted)} lists of one length: {', '.join(wanted)}"
        )
    return given


def _flag_of(name: str, noop_flag: Any) -> Tensor:
    """Return `noop_flag` as a tensor of shape [1] that shares its memory."""
    if not isinstance(noop_flag, Tensor) or noop_flag.numel() != 1:
        raise TypeError(
            f"{name}: noop_flag is {noop_flag!r}, a tensor of one element is wanted: torch.cuda.IntTensor([0])"
        )
    return noop_flag.view(1)


@contextmanager
def _raising(name: str, noop_flag: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield a `found_inf` for the kernels, on the tensors' device; at the end of the block set the flag from it."""
    flag = _flag_of(name, noop_flag)
    found_inf = torch.zeros((), dtype=torch.float32, device=tensors[0].device if tensors else flag.device)
    yield found_inf
    flag.masked_fill_(found_inf.to(flag.device) != 0, 1)


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float | Tensor) -> None:
    """Write `dst = src * scale` for the lists [src, dst]; sets the flag."""
    src, dst = _lists_of("multi_tensor_scale", tensor_lists, "src", "dst")
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
    """Write `out = a * x + b * y` for the lists [x, y, out]; sets the flag.

    `arg_to_check` is -1 if both x and y set the flag, 0 if only x does, 1 if only y does.
    """
    x, y, out = _lists_of("multi_tensor_axpby", tensor_lists, "x", "y", "out")
    if arg_to_check not in _CHECK:
        raise ValueError(f"multi_tensor_axpby: arg_to_check={arg_to_check!r}, wanted -1 (both), 0 (x) or 1 (y)")
    with _raising("multi_tensor_axpby", noop_flag, x) as found_inf:
        multi_tensor.multi_tensor_axpby(a, x, b, y, out, found_inf, check=_CHECK[arg_to_check])


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return 2-norms of the tensors in the list [x]. If the norm of all together is not finite, set the flag.

    Returns:
        The norm of all tensors together, shape [1].
        The norm of each tensor, shape [len(x)]; without `per_tensor` an empty tensor, shape [0].
    """
    (x,) = _lists_of("multi_tensor_l2norm", tensor_lists, "x")
    flag = _flag_of("multi_tensor_l2norm", noop_flag)
    if not x:
        total = torch.zeros(1, dtype=torch.float32, device=flag.device)
        return total, total[:0]
    total, each = multi_tensor.multi_tensor_l2norm(x, per_tensor=True)
    flag.masked_fill_(~total.isfinite().to(flag.device), 1)
    return total.reshape(1), each if per_tensor else each[:0]


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
    """Do `amp_patch.multi_tensor.update_scale` without bounds, in place; return `current_scale`."""
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
    grads, params, buffers, *copies = _lists_of(name, tensor_lists, *wanted[: max(3, min(len(tensor_lists), 4))])
    flag = _flag_of(name, noop_flag) != 0
    skipped = flag.to(device=params[0].device if params else flag.device, dtype=torch.float32)
    if scale != 1.0:
        scaled = [torch.empty_like(g, dtype=wide(p.dtype)) for g, p in zip(grads, params, strict=True)]
        multi_tensor.multi_tensor_scale(grads, scaled, scale)
        grads = scaled
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
    for master, copy in zip(params, *copies, strict=True) if copies else ():
        copy.copy_(torch.where(skipped != 0, copy, master.to(copy.dtype)))


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
    grads, *written = _lists_of("multi_tensor_adam", tensor_lists, "grads", "params", "exp_avgs", "exp_avg_sqs")
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
    grads, params, *states = _lists_of("multi_tensor_lamb", tensor_lists, "grads", "params", "exp_avgs", "exp_avg_sqs")
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

"""The functions of `amp_C` that scale lists of tensors, add them and return norms, and `update_scale_hysteresis`."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.apex.amp_C.arguments import Lists, flag_of, lists_of, multiplied, raising
from amp_patch.optimizers.novograd import NORMS, blend_norms, norms_of

__all__ = ["multi_tensor_axpby", "multi_tensor_l2norm", "multi_tensor_l2norm_mp", "multi_tensor_l2norm_scale"]
__all__ += ["multi_tensor_scale", "multi_tensor_unscale_l2norm", "update_scale_hysteresis"]

_CHECK: dict[int, Literal["both", "x", "y"]] = {-1: "both", 0: "x", 1: "y"}


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float | Tensor) -> None:
    """Write `dst = src * scale` for the lists [src, dst]; sets the flag."""
    src, dst = lists_of("multi_tensor_scale", tensor_lists, "src", "dst")
    with raising("multi_tensor_scale", noop_flag, src) as found_inf:
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
    x, y, out = lists_of("multi_tensor_axpby", tensor_lists, "x", "y", "out")
    if arg_to_check not in _CHECK:
        raise ValueError(f"multi_tensor_axpby: arg_to_check={arg_to_check!r}, wanted -1 (both), 0 (x) or 1 (y)")
    with raising("multi_tensor_axpby", noop_flag, x) as found_inf:
        multi_tensor.multi_tensor_axpby(a, x, b, y, out, found_inf, check=_CHECK[arg_to_check])


def _norms(name: str, noop_flag: Tensor, x: list[Tensor], per_tensor: bool | None) -> tuple[Tensor, Tensor]:
    """Return what `multi_tensor_l2norm` does for the list `x`, and set its flag. Errors begin with `name`."""
    flag = flag_of(name, noop_flag)
    if not x:
        total = torch.zeros(1, dtype=torch.float32, device=flag.device)
        return total, total[:0]
    total, each = multi_tensor.multi_tensor_l2norm(x, per_tensor=True)
    flag.masked_fill_(~total.isfinite().to(flag.device), 1)
    return total.reshape(1), each if per_tensor else each[:0]


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return 2-norms of the tensors in the list [x]. If the norm of all together is not finite, set the flag.

    Returns:
        The norm of all tensors together, shape [1].
        The norm of each tensor, shape [len(x)]; without `per_tensor` an empty tensor, shape [0].
    """
    (x,) = lists_of("multi_tensor_l2norm", tensor_lists, "x")
    return _norms("multi_tensor_l2norm", noop_flag, x, per_tensor)


@torch.no_grad()
def multi_tensor_l2norm_mp(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Do `multi_tensor_l2norm`. Apex has this second name for its kernel with bfloat16."""
    (x,) = lists_of("multi_tensor_l2norm_mp", tensor_lists, "x")
    return _norms("multi_tensor_l2norm_mp", noop_flag, x, per_tensor)


@torch.no_grad()
def multi_tensor_l2norm_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Write `dst = src * scale`, for the lists [src, dst]; return the two results of `multi_tensor_l2norm` for src."""
    src, dst = lists_of("multi_tensor_l2norm_scale", tensor_lists, "src", "dst")
    norms = _norms("multi_tensor_l2norm_scale", noop_flag, src, per_tensor)  # dst may be src
    multi_tensor.multi_tensor_scale(src, dst, scale)
    return norms


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, inv_scale: Tensor, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return the two results of `multi_tensor_l2norm` for `x * inv_scale`, where the list [x] is only read.

    `inv_scale` has one element.
    """
    (x,) = lists_of("multi_tensor_unscale_l2norm", tensor_lists, "x")
    if x:
        factor = torch.as_tensor(inv_scale, dtype=torch.float32, device=x[0].device)
        x = multiplied(x, factor.reshape(()), like=x)
    return _norms("multi_tensor_unscale_l2norm", noop_flag, x, per_tensor)


def blend_into(
    name: str, noop_flag: Tensor, x: list[Tensor], out: Tensor, alpha: float, beta: float, norm_type: int
) -> None:
    """Blend the norm of each tensor of `x` into `out`, shape [len(x)], in place; set the flag if one is not finite.

    For norm_type 2, the 2-norm, `out = sqrt(alpha * out**2 + beta * norm**2)`. For norm_type 0, the largest absolute
    value, `out = alpha * out + beta * norm`. Errors begin with `name`.
    """
    if norm_type not in NORMS:
        raise ValueError(f"{name}: norm_type={norm_type!r}, wanted 2 (the 2-norm) or 0 (the largest absolute value)")
    if out.shape != (len(x),):
        raise ValueError(f"{name}: the norms have shape {list(out.shape)}, [{len(x)}] is wanted, one for each tensor")
    if not x:
        return
    flag, norms = flag_of(name, noop_flag), norms_of(x, norm_type)
    flag.masked_fill_(~norms.isfinite().all().to(flag.device), 1)
    out.copy_(blend_norms(out.to(norms), norms, alpha, beta, norm_type))


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

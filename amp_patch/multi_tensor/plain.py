"""The kernels in plain torch, for devices that the extension is not built for.

`backends.run` calls them, after the checks and without grad mode. Tests compare the extension with them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amp_patch.multi_tensor.checks import Number, Tensors
from amp_patch.support.devices import widest

# The smallest power of two whose inverse is finite in FP32.
SMALLEST_SCALE = 2.0**-127


def _widen(tensors: Tensors) -> list[Tensor]:
    return [t if t.dtype == torch.float64 else t.float() for t in tensors]


def _times(tensors: Tensors, factor: Number) -> list[Tensor]:
    wide = _widen(tensors)
    if not isinstance(factor, Tensor):
        return list(torch._foreach_mul(wide, float(factor)))
    # The factor is cast to each tensor's type. Otherwise an FP64 factor would promote an FP32 tensor of shape [].
    factors = {dtype: factor.reshape(()).to(dtype) for dtype in {t.dtype for t in wide}}
    if len(factors) == 1:
        return list(torch._foreach_mul(wide, factors[wide[0].dtype]))
    return [t * factors[t.dtype] for t in wide]


def _is_one(factor: Number) -> bool:
    return not isinstance(factor, Tensor) and factor == 1.0


def _raise_flag(found_inf: Tensor | None, finite: list[Tensor]) -> None:
    if found_inf is not None and finite:
        found_inf.masked_fill_(~torch.stack(finite).all(), 1.0)


def scale(src: Tensors, dst: Tensors, factor: Number, found_inf: Tensor | None) -> None:
    """`multi_tensor_scale`: writes `dst` and `found_inf` in place; no sync."""
    if not src:
        return
    copies = _is_one(factor) and found_inf is None  # a product with 1.0 would change the bits of NaNs
    torch._foreach_copy_(list(dst), list(src) if copies else _times(src, factor))
    check_finite(dst, found_inf)


def unscale(grads: Tensors, inv_scale: Number, found_inf: Tensor | None) -> None:
    """`multi_tensor_unscale`: writes `grads` and `found_inf` in place; no sync."""
    scale(grads, grads, inv_scale, found_inf)


def axpby(
    x: Tensors, y: Tensors, out: Tensors, a: Number, b: Number, found_inf: Tensor | None, watch_x: bool, watch_y: bool
) -> None:
    """`multi_tensor_axpby`: writes `out` and `found_inf` in place; no sync.

    A non-finite element of `x` raises the flag if `watch_x`, of `y` if `watch_y`.
    """
    if not x:
        return
    # A non-finite result raises no flag where only the list that is not watched is non-finite: there it is excused.
    watched, other = (x, y) if watch_x else (y, x)
    both = watch_x and watch_y
    excused = [w.isfinite() & ~(w if both else o).isfinite() for w, o in zip(watched, other, strict=True)]
    torch._foreach_copy_(list(out), torch._foreach_add(_times(x, a), _times(y, b)))
    _raise_flag(found_inf, [(t.isfinite() | excuse).all() for t, excuse in zip(out, excused, strict=True)])


def check_finite(tensors: Tensors, found_inf: Tensor | None, factor: Number = 1.0) -> None:
    """`multi_tensor_check_finite`: writes `found_inf` in place; no sync."""
    if found_inf is not None and tensors:
        scaled = tensors if _is_one(factor) else _times(tensors, factor)
        _raise_flag(found_inf, [t.isfinite().all() for t in scaled])


def l2norm(tensors: Tensors, factor: Number = 1.0, found_inf: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`multi_tensor_l2norm`: returns (norm of all, shape []; norm of each, shape [len(tensors)]); no sync."""
    check_finite(tensors, found_inf, factor)
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    if not tensors:
        total = torch.zeros((), dtype=torch.float32, device="cpu")
        return total, total.new_zeros(0)
    scaled = tensors if _is_one(factor) else _times(tensors, factor)
    norms = torch.stack([torch.linalg.vector_norm(t, dtype=dtype) for t in scaled])
    return torch.linalg.vector_norm(norms), norms


def unscale_l2norm(grads: Tensors, inv_scale: Number, found_inf: Tensor | None) -> tuple[Tensor, Tensor]:
    """`unscale`, which writes `grads` in place, then `l2norm` of the stored values."""
    unscale(grads, inv_scale, found_inf)
    total, norms = l2norm(grads)
    return (total, norms) if grads or found_inf is None else (total.to(found_inf.device), norms.to(found_inf.device))


def adopt(params: Tensors, masters: Tensors) -> None:
    """`multi_tensor_adopt`: writes `masters`, FP32, in place; no sync."""
    for param, master in zip(params, masters, strict=True):
        master.copy_(torch.where(master.to(param.dtype) == param, master, param.float()))


def moved_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    lowest: float,
    highest: float,
    hysteresis: int,
    hysteresis_tracker: Tensor | None,
    earlier_inf: Tensor | None,
) -> None:
    """`update_scale`: writes its tensors of one element but `found_inf` in place; no sync."""
    overflow = (found_inf != 0).reshape(scale.shape)
    if earlier_inf is not None:
        overflow = overflow | (earlier_inf != 0).reshape(scale.shape)
        earlier_inf.zero_()
    exhausted = overflow
    if hysteresis_tracker is not None:
        hysteresis_tracker.copy_(
            torch.where(overflow.reshape(hysteresis_tracker.shape), hysteresis_tracker - 1, hysteresis)
        )
        exhausted = overflow & (hysteresis_tracker <= 0).reshape(scale.shape)
    # Products in FP64, rounded once, have the extension's bits. So do products in FP32 if FP32 holds the factor, as the
    # defaults; on a device without FP64, another factor is rounded to FP32.
    wide = scale.to(widest(scale.device))
    lower, higher = (wide * factor for factor in (backoff_factor, growth_factor))
    lower, higher = lower.clamp(min=SMALLEST_SCALE).float(), higher.float()
    steps = torch.where(overflow, 0, growth_tracker.reshape(scale.shape) + 1)
    grows = ~overflow & (steps >= growth_interval)
    growth_tracker.copy_(torch.where(grows, 0, steps).reshape(growth_tracker.shape))
    new = torch.where(exhausted, lower, torch.where(grows & higher.isfinite(), higher, scale))
    scale.copy_(new.clamp(lowest, highest))

"""The oracle of each kernel for tests and benchmarks: the obvious torch version, for one tensor at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def widen(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()


def scale(src: Tensor, dtype: torch.dtype, factor: float) -> Tensor:
    return (widen(src) * factor).to(dtype)


def axpby(a: float, x: Tensor, b: float, y: Tensor, dtype: torch.dtype) -> Tensor:
    return (a * widen(x) + b * widen(y)).to(dtype)


def is_bad(*tensors: Tensor) -> bool:
    return not all(t.isfinite().all() for t in tensors)


def l2norm(tensors: list[Tensor]) -> Tensor:
    return (
        torch.cat([t.double().flatten() for t in tensors]).norm() if tensors else torch.zeros((), dtype=torch.float64)
    )


def adopt(param: Tensor, master: Tensor) -> Tensor:
    return torch.where(master.to(param.dtype) == param, master, param.float())


def update_scale(scale: float, tracker: int, overflow: bool, growth: float, backoff: float, interval: int):
    """(scale, tracker) of ``torch._amp_update_scale_``, in Python numbers."""
    if overflow:
        return scale * backoff, 0
    return (scale * growth, 0) if tracker + 1 == interval else (scale, tracker + 1)

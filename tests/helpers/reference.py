"""The oracle of each kernel for tests and benchmarks: the obvious torch version, one tensor at a time; FP8, FP4 too."""

from __future__ import annotations

import math

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


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def rounded(values: Tensor, element: str) -> Tensor:
    """Return FP32 values rounded to nearest in the format, saturated."""
    values = values.clamp(-LARGEST[element], LARGEST[element])
    if element in TYPES:
        return values.to(TYPES[element]).float()
    table = torch.tensor(E2M1)
    distance = (values.abs().unsqueeze(-1).double() - table).abs()
    odd = torch.tensor([0, 1] * 4) * 1e-12  # of two that are as near the one whose last bit is 0
    return table[(distance + odd).argmin(-1)].copysign(values)


def quantized(x: Tensor, tile: tuple[int, int] | None, element: str, scale: str) -> tuple[Tensor, float]:
    """Round a matrix in tiles of (rows, columns), each with a scale; None: one tile. Return (values, factor)."""
    rows, columns = x.shape if tile is None else (min(tile[0], x.shape[0]), min(tile[1], x.shape[1]))
    x, largest, result = x.float(), LARGEST[element], torch.empty(x.shape)
    whole = float((x.abs().max() / largest) / 448.0) or 1.0
    for r in range(0, x.shape[0], rows):
        for c in range(0, x.shape[1], columns):
            part = x[r : r + rows, c : c + columns]
            m = part.abs().max()
            if scale == "up":
                s = torch.tensor(2.0 ** max(math.ceil(math.log2(m / largest)), -126) if m > 0 else 2.0**-126)
            elif scale == "floor":
                s = torch.tensor(2.0 ** (math.floor(math.log2(m)) - math.floor(math.log2(largest))) if m > 0 else 1.0)
            elif scale == "two_levels":
                s = rounded(m / largest / whole, "e4m3")
            else:
                s = m / largest if m > 0 else torch.tensor(1.0)
            inner = s * (whole if scale == "two_levels" else 1.0)
            values = torch.zeros_like(part) if inner == 0 else rounded(part / inner, element)
            result[r : r + rows, c : c + columns] = values if scale == "exact" else values * s
    return result, {"exact": float(s), "two_levels": whole}.get(scale, 1.0)


# format -> (element, element of gradients, scale, elements of a tile along the sum; 0: all)
FORMATS = {
    "fp8": ("e4m3", "e4m3", "up", 0),
    "fp8_tensorwise": ("e4m3", "e5m2", "exact", None),
    "mxfp8": ("e4m3", "e4m3", "up", 32),
    "mxfp8_floor": ("e4m3", "e4m3", "floor", 32),
    "nvfp4_naive": ("e2m1", "e2m1", "two_levels", 16),
}


def operand(x: Tensor, format: str, gradient: bool = False) -> Tensor:
    """Return a rounded matrix in FP64; a product sums over the elements of each row."""
    element, of_gradients, scale, block = FORMATS[format]
    tile = None if block is None else (1, block or x.shape[1])
    values, factor = quantized(x, tile, of_gradients if gradient else element, scale)
    return values.double() * factor


def linear(x: Tensor, weight: Tensor, grad: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor]:
    """The result of a layer, [M, K] by [N, K], and for a gradient of [M, N] those of x and of the weight, in FP64."""
    result = operand(x, format) @ operand(weight, format).T
    of_x = operand(grad, format, True) @ operand(weight.T, format).T
    of_weight = operand(grad.T, format, True) @ operand(x.T, format).T
    return result, of_x, of_weight

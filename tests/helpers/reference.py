"""The oracle of each kernel for tests and benchmarks: the obvious torch version, one tensor at a time; FP8, FP4 too."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from amp_patch import multi_tensor as mt


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


SIZES = [0, *range(1, 41), 100, 511, 16384, 16385, 3 * 16384 + 13]  # around vectors and chunks
ADAM = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "decoupled": True}
SGD = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}


def draw(sizes, seed, device="cpu", spread=2.0):
    """Return numbers of many magnitudes, so that another order of roundings changes the result."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [size if isinstance(size, tuple) else (size,) for size in sizes]
    return [
        (torch.randn(s, generator=generator) * torch.exp(spread * torch.randn(s, generator=generator))).to(device)
        for s in shapes
    ]


class State:
    """Masters, states, weights and gradients; one step of amp_patch, and the same by torch."""

    def __init__(self, sizes=SIZES, low=None, device="cpu", seed=0, steps=0, layout=lambda t: t):
        self.sizes, self.device, self.layout = sizes, device, layout
        self.params = [layout(t) for t in draw(sizes, seed, device)]
        self.m, self.v, self.most = ([torch.zeros_like(p) for p in self.params] for _ in range(3))
        self.steps = [torch.tensor(float(steps), device=device) for _ in self.params]
        self.low = None if low is None else [p.to(low) for p in self.params]

    def gradients(self, seed, dtype=torch.float32):
        self.grads = [self.layout(t).to(dtype) for t in draw(self.sizes, seed, self.device)]

    def adam(self, amsgrad=False, **options):
        most = self.most if amsgrad else None
        mt.multi_tensor_adam(self.grads, self.params, self.m, self.v, most, self.steps, self.low, **options)

    def sgd(self, **options):
        buffers = self.m if options["momentum"] else None
        mt.multi_tensor_sgd(self.grads, self.params, buffers, self.low, **options)

    def prepare(self, factors):
        """Do what a user must do before torch's step: adopt edited weights and unscale gradients."""
        if self.low:
            self.params = [adopt(w, p) for w, p in zip(self.low, self.params, strict=True)]
        grads = [g.float() for g in self.grads]
        for factor in factors:
            grads = [g * factor for g in grads]
        return grads

    def reference_adam(self, amsgrad=False, factors=(), decoupled=True, maximize=False, **options):
        grads = self.prepare(factors)
        torch._foreach_add_(self.steps, 1)
        (torch._fused_adamw_ if decoupled else torch._fused_adam_)(
            *(self.params, grads, self.m, self.v, self.most if amsgrad else [], self.steps),
            **(options | {"amsgrad": amsgrad, "maximize": maximize}),
        )
        self.publish()

    def reference_sgd(self, factors=(), maximize=False, first_run=False, **options):
        grads = self.prepare(factors)
        torch._fused_sgd_(
            *(self.params, grads, self.m if options["momentum"] else []),
            **(options | {"maximize": maximize, "is_first_step": first_run}),
        )
        self.publish()

    def publish(self):
        if self.low:
            self.low = [p.to(w.dtype) for p, w in zip(self.params, self.low, strict=True)]

    def everything(self):
        return [*self.params, *self.m, *self.v, *self.most, *self.steps, *(self.low or [])]

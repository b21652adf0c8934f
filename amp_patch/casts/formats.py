"""Rounding of tensors to FP8 and FP4 for the emulated products of O6 and O7: formats, recipes and scales.

A rounded tensor is stored in FP32, as `values`, and for some recipes one scale of the whole tensor, by which `values`
must be multiplied. Each value is a number of the format times the scale of its tile (elements that share a scale). FP32
holds this product exactly. On a CPU the extension returns the same bits (csrc/casts/formats.cpp).

Sources: the formats, "FP8 Formats for Deep Learning" (Micikevicius et al., arXiv 2209.05433) and the OCP Microscaling
Formats specification v1.0; "fp8" and "fp8_tensorwise", torchao's float8 recipes of these names; "mxfp8", "Recipes for
Pre-training LLMs with MXFP8" (Mishra et al., arXiv 2506.08027); "mxfp8_floor", OCP's own conversion; "nvfp4",
"Pretraining Large Language Models with NVFP4" (NVIDIA, arXiv 2509.25149).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.multi_tensor.plain_random import random_bits

Role = Literal["activation", "weight", "gradient"]
ROWS, COLUMNS = -1, -2  # the dimension that a product sums over


@dataclass(frozen=True)
class Element:
    """A number format with few bits: sign, exponent and `mantissa` bits. Numbers beyond `largest` saturate.

    Attributes:
        mantissa: the bits after the leading one.
        least_exponent: the least exponent of normal numbers; subnormal numbers have the same step.
        largest: the largest number.
    """

    mantissa: int
    least_exponent: int
    largest: float


E4M3 = Element(mantissa=3, least_exponent=-6, largest=448.0)
E5M2 = Element(mantissa=2, least_exponent=-14, largest=57344.0)
E2M1 = Element(mantissa=1, least_exponent=0, largest=6.0)

# How the scale of a tile is computed. The values of the tile are divided by the scale before they are rounded. Below, m
# is the largest magnitude in the tile, and M the largest number of the element. The scale of a tile with an infinity or
# NaN is NaN. Scales that are powers of two are clamped to 2**-126 and 2**127.
Scale = Literal[
    "exact",  # m / M, in FP32; 1 if that is 0
    "up",  # the smallest power of two that is not below m / M: nothing saturates
    "floor",  # as in OCP: 2**floor(log2 m) / 2**floor(log2 M); magnitudes above M times the scale saturate
    "two_levels",  # m / M / g rounded to E4M3, times g; g: the tensor's largest magnitude / M / 448, in FP32
]


@dataclass(frozen=True)
class Recipe:
    """How the operands of products are rounded.

    Attributes:
        element: the format of activations and weights.
        gradient: the format of gradients.
        scale: the scale of a tile.
        block: the number of elements that share a scale, along the dimension that the product sums over. 0: all
            elements of that dimension. None: the whole tensor.
        square_weights: the tiles of a weight are `block` x `block`, so that forward and backward, which sum over
            different dimensions, multiply by the same values.
        stochastic: gradients are rounded up or down at random; the nearer number is the more probable.
        hadamard: both operands of a weight's gradient are first multiplied by a Hadamard matrix with random signs. It
            spreads outliers over 16 elements, and cancels in the product.
    """

    element: Element = E4M3
    gradient: Element = E4M3
    scale: Scale = "up"
    block: int | None = 0
    square_weights: bool = False
    stochastic: bool = False
    hadamard: bool = False


FORMATS: dict[str, Recipe] = {  # PRODUCT_FORMATS of policy.py has the names
    "fp8": Recipe(),
    "fp8_tensorwise": Recipe(gradient=E5M2, scale="exact", block=None),
    "mxfp8": Recipe(block=32),
    "mxfp8_floor": Recipe(scale="floor", block=32),
    "nvfp4": Recipe(E2M1, E2M1, "two_levels", 16, square_weights=True, stochastic=True, hadamard=True),
    "nvfp4_naive": Recipe(E2M1, E2M1, "two_levels", 16),
}

_EXPONENT = 0x7F800000  # the exponent bits of FP32
_HADAMARD = 16  # the order of the matrix
_SIGNS = 0b1011_0010_0110_1000  # the random signs of 16 rows (bit 1: minus): drawn once for all calls, as in the paper


# ---------------------------------------------------------------------------------------------------------------------
# One operand of a product


def quantized(
    tensor: Tensor, along: int, role: Role, recipe: Recipe, hadamard: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return `tensor` rounded by a recipe. Does not sync.

    Args:
        tensor: BF16, [..., rows, columns], with any strides.
        along: the dimension that the product sums over: ROWS (a sum over the elements of each row) or COLUMNS.
        role: the kind of operand.
        hadamard: first multiply by the Hadamard matrix along the dimension `along`, which is padded with zeros to a
            multiple of 16.

    Returns:
        (values, scale). `values` is FP32 with the shape of `tensor` (padded if `hadamard`); `scale` is FP32 of shape
        [], or None for a scale of 1. The random bits of stochastic rounding depend only on the values of `tensor`, so
        that a repeated step has the same result.
    """
    if not tensor.is_contiguous() and tensor.mT.is_contiguous():
        values, scale = quantized(tensor.mT, COLUMNS if along == ROWS else ROWS, role, recipe, hadamard)
        return values.mT, scale
    tensor = tensor.contiguous()
    element = recipe.gradient if role == "gradient" else recipe.element
    extension = multi_tensor.extension() if tensor.device.type == "cpu" else None
    draw: int | Tensor | None = None
    if recipe.stochastic and role == "gradient":
        bits = tensor.view(torch.int16)
        draw = bits.sum(dtype=torch.int64) if extension is None else extension.casts.sum_of_bits(tensor)
    if hadamard:
        if along == ROWS:  # the matrix multiplies along columns
            tensor = tensor.mT.contiguous()
        tensor = hadamard_plainly(tensor) if extension is None else extension.casts.hadamard(tensor, _SIGNS)
        if along == ROWS:
            tensor = tensor.mT.contiguous()
    rows, columns = tile_of(tensor, along, role, recipe)
    key = 0 if along == ROWS else 1
    if extension is None:
        return quantize_plainly(tensor, rows, columns, element, recipe.scale, draw, key)
    numbers = element.mantissa, element.least_exponent, element.largest
    result: tuple[Tensor, Tensor | None] = extension.casts.quantize(
        tensor, rows, columns, *numbers, recipe.scale, draw, key
    )
    return result


def tile_of(tensor: Tensor, along: int, role: Role, recipe: Recipe) -> tuple[int, int]:
    """Return the (rows, columns) of one tile of `tensor`; (0, 0) if the whole tensor is one tile."""
    if recipe.block is None:
        return 0, 0
    if recipe.square_weights and role == "weight":
        return recipe.block, recipe.block
    length = recipe.block or max(tensor.shape[along], 1)
    return (1, length) if along == ROWS else (length, 1)


# ---------------------------------------------------------------------------------------------------------------------
# Quantization in plain torch, step by step: the reference for csrc/casts/formats.cpp


def quantize_plainly(
    tensor: Tensor,
    rows: int,
    columns: int,
    element: Element,
    scale: Scale,
    draw: int | Tensor | None = None,
    key: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Round `tensor`, [..., R, C], in tiles of `rows` x `columns`; return new tensors, as `quantized` does.

    Args:
        rows, columns: the size of a tile; 0 if the whole tensor is one tile.
        draw: the number of the draw for stochastic rounding, as an int or a tensor of shape [] on the device; None
            rounds to nearest.
        key: a second number that selects the random bits.
    """
    one_scale = rows == 0
    random = None if draw is None else random_bits(tensor, key, draw)
    if not one_scale:
        height, width = tensor.shape[-2:]
        tensor = _in_tiles(tensor, rows, columns)
        random = None if random is None else _in_tiles(random, rows, columns)
    value = tensor.to(torch.float32, copy=True).abs_()
    if one_scale:
        largest = value.amax() if tensor.numel() else value.new_zeros(())
    else:
        largest = value
        for dim in (-3, -1):
            largest = largest if largest.shape[dim] == 1 else largest.amax(dim, keepdim=True)
    outer = None
    if scale == "two_levels":
        whole = _divided(largest.amax() if tensor.numel() else value.new_zeros(()), element.largest, E4M3.largest)
        whole = torch.where(whole < math.inf, whole, math.nan)
        outer = torch.where(whole == 0, 1.0, whole)
    divide, multiply = scales_of(largest, element, scale, outer)
    if scale == "exact" and one_scale:
        outer = divide
    _round(value.div_(divide), element, random, tensor)
    if multiply is not None:
        value.mul_(multiply)
    return value if one_scale else _out_of_tiles(value, height, width), outer


def scales_of(largest: Tensor, element: Element, scale: Scale, whole: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return (divisors, factors) for tiles with the largest magnitudes `largest`.

    The values of a tile are divided by its divisor before rounding, and multiplied by its factor afterwards. Both
    results are FP32 with the shape of `largest`. The factors are None if they are all 1. `whole` is the tensor's scale
    under "two_levels" (`g` in `Scale`), else unused.
    """
    finite = largest < math.inf
    if scale == "exact":
        ratio = _divided(largest, element.largest)
        return torch.where(finite, torch.where(ratio > 0, ratio, 1.0), math.nan), None
    if scale == "two_levels":
        assert whole is not None
        multiply = _round(_divided(largest, element.largest) / whole, E4M3)
        both = multiply * whole
        divide = torch.where(both == 0, math.inf, both)
        return torch.where(finite, divide, math.nan), torch.where(finite, multiply, math.nan)
    if scale == "up":  # to the next exponent, unless the number is a power of two
        bits = _divided(largest, element.largest).view(torch.int32).add_(0x7FFFFF).bitwise_and_(_EXPONENT)
    else:
        bits = (largest.view(torch.int32) & _EXPONENT).sub_(int(math.log2(element.largest)) << 23)
    power = torch.where(finite, bits.clamp_(1 << 23, 254 << 23).view(torch.float32), math.nan)
    return power, power


def _divided(tensor: Tensor, *numbers: float) -> Tensor:
    """Return FP32 `tensor` divided by each of `numbers` in turn, rounded once for each.

    On CUDA torch divides by a number as a product with its reciprocal, which gives another last bit than on a CPU. If
    the number is a tensor on the device, torch divides.
    """
    for number in numbers:
        tensor = tensor / tensor.new_full((), number)
    return tensor


def rounded(values: Tensor, element: Element, divide: Tensor | float = 1.0) -> Tensor:
    """Return FP32 `values / divide` as numbers of the format, in FP32: to nearest, ties to even, saturated."""
    return _round(values.abs().div_(divide), element, signs=values)


def _round(value: Tensor, element: Element, random: Tensor | None = None, signs: Tensor | None = None) -> Tensor:
    """Round the magnitudes `value` in place to numbers of the format; return them.

    The passes over memory dominate the time on a CPU, so the code makes few. torch's casts to its float8 types and back
    give the same bits, and take several times as long.

    Args:
        random: 16 random bits for each value (integers), which round it stochastically. None: round to nearest.
        signs: numbers whose signs the values get; None: they stay positive.
    """
    value.clamp_(max=element.largest)  # `largest` rounds to itself
    exponent = (value.view(torch.int32) & _EXPONENT).clamp_(min=127 + element.least_exponent << 23)
    scratch = exponent.view(torch.float32)
    if random is None:
        # `scratch` becomes a number so large that FP32 rounds `value + scratch` at the format's last digit. The
        # subtraction then leaves the rounded value.
        exponent.add_((23 - element.mantissa << 23) + 0x400000)
        value.add_(scratch).sub_(scratch)
    else:
        exponent.sub_(element.mantissa << 23)  # the format's step at this exponent
        value.div_(scratch).add_(random * 2.0**-16).floor_().mul_(scratch)
    if signs is not None:  # on a CPU copysign_ is not vectorized
        scratch.copy_(signs)
        value.view(torch.int32).bitwise_or_(exponent.bitwise_and_(-(2**31)))
    return value


def _in_tiles(tensor: Tensor, rows: int, columns: int) -> Tensor:
    """Return [..., R, C] as [..., down, `rows`, across, `columns`]; zeros fill the last tiles."""
    height, width = tensor.shape[-2:]
    if width % columns or height % rows:
        tensor = torch.nn.functional.pad(tensor, (0, -width % columns, 0, -height % rows))
    return tensor.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))


def _out_of_tiles(tiles: Tensor, height: int, width: int) -> Tensor:
    return tiles.flatten(-2).flatten(-3, -2)[..., :height, :width].contiguous()


def hadamard_plainly(tensor: Tensor) -> Tensor:
    """Multiply [..., R, C], padded with zero rows to a multiple of 16, by a random Hadamard matrix; return FP32.

    Rows get the signs of `_SIGNS`, and then each group of 16 rows is multiplied by Hadamard's matrix / 4. The transform
    is orthogonal, so A.mT @ B does not change if both are transformed.
    """
    rows, columns = tensor.shape[-2:]
    bands = -(-rows // _HADAMARD)
    signs = [-1.0 if _SIGNS >> row & 1 else 1.0 for row in range(_HADAMARD)] * bands
    wide = tensor.float() * tensor.new_tensor(signs[:rows], dtype=torch.float32)[:, None]
    wide = torch.nn.functional.pad(wide, (0, 0, 0, bands * _HADAMARD - rows)).unflatten(-2, (bands, _HADAMARD))
    for half in (1, 2, 4, 8):
        pairs = wide.unflatten(-2, (_HADAMARD // (2 * half), 2, half))
        a, b = pairs.unbind(-3)
        wide = torch.stack((a + b, a - b), -3).flatten(-4, -2)
    return (wide * 0.25).flatten(-3, -2).reshape(*tensor.shape[:-2], bands * _HADAMARD, columns)

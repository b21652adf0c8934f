"""FP8 and FP4: the formats of numbers, the scales that recipes give them, and tensors rounded so, in FP32.

A rounded tensor is `values` times the tensor's own scale, if it has one: each value is a number of the format times the
scale of its tile, which FP32 holds exactly. The extension does the same on a CPU (csrc/casts/formats.cpp), to the bit.

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
ROWS, COLUMNS = -1, -2  # along which the sums of a product run


@dataclass(frozen=True)
class Element:
    """A format of numbers with few bits: sign, exponent, `mantissa` bits; no infinities, larger numbers saturate.

    Attributes:
        mantissa: bits behind the leading one.
        least_exponent: of normal numbers; below them the steps stay as they are there.
        largest: the largest number.
    """

    mantissa: int
    least_exponent: int
    largest: float


E4M3 = Element(mantissa=3, least_exponent=-6, largest=448.0)
E5M2 = Element(mantissa=2, least_exponent=-14, largest=57344.0)
E2M1 = Element(mantissa=1, least_exponent=0, largest=6.0)

# What is divided by before rounding, for a tile whose largest magnitude is m, in an element whose largest number is M.
# A tile with an infinity or NaN has the scale NaN. Powers of two lie between 2**-126 and 2**127.
Scale = Literal[
    "exact",  # m / M, in FP32; 1 where that is 0
    "up",  # the smallest power of two that is not below m / M: nothing saturates
    "floor",  # the power of two of m over that of M, as OCP has it: what lies above M times it saturates
    "two_levels",  # m / M / g rounded to E4M3, times g: the tensor's largest magnitude / M / 448, in FP32
]


@dataclass(frozen=True)
class Recipe:
    """How the operands of products are rounded.

    Attributes:
        element: the format of activations and weights.
        gradient: the format of gradients.
        scale: of a tile.
        block: how many elements along a sum have a scale of their own. 0: all of one sum. None: the whole tensor.
        square_weights: a weight's tiles are squares of `block`, so that forward and backward multiply by one value.
        stochastic: gradients are rounded up or down by chance, in proportion.
        hadamard: both operands of a weight's gradient are multiplied by a Hadamard matrix with random signs first,
            which spreads outliers over 16 elements, and cancels in the product.
    """

    element: Element = E4M3
    gradient: Element = E4M3
    scale: Scale = "up"
    block: int | None = 0
    square_weights: bool = False
    stochastic: bool = False
    hadamard: bool = False


_NVFP4 = Recipe(E2M1, E2M1, "two_levels", 16)
FORMATS: dict[str, Recipe] = {  # PRODUCT_FORMATS of policy.py has the names
    "fp8": Recipe(),
    "fp8_tensorwise": Recipe(gradient=E5M2, scale="exact", block=None),
    "mxfp8": Recipe(block=32),
    "mxfp8_floor": Recipe(scale="floor", block=32),
    "nvfp4": Recipe(E2M1, E2M1, "two_levels", 16, square_weights=True, stochastic=True, hadamard=True),
    "nvfp4_naive": _NVFP4,
}

_EXPONENT = 0x7F800000  # the bits of FP32's
_HADAMARD = 16  # the matrix's order
_SIGNS = 0b1011_0010_0110_1000  # of the rows that it is given: drawn once, as the paper has it


# ---------------------------------------------------------------------------------------------------------------------
# A tensor of one operand


def quantized(
    tensor: Tensor, along: int, role: Role, recipe: Recipe, hadamard: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`tensor` rounded by a recipe.

    Args:
        tensor: BF16, [..., rows, columns], of any strides.
        along: the dimension that the product sums over, ROWS (each row is a sum's) or COLUMNS.
        role: what it is in the training.
        hadamard: multiply it by the Hadamard matrix along the sum first, which is made a multiple of 16 long by zeros.

    Returns:
        (values, scale): FP32, of the shape of `tensor` (longer by `hadamard`), and FP32 of shape [], or None for 1.
        Bits of chance depend on the values of `tensor` alone, so that a step that is made again is the same. Does not
        sync.
    """
    if not tensor.is_contiguous() and tensor.mT.is_contiguous():
        values, scale = quantized(tensor.mT, COLUMNS if along == ROWS else ROWS, role, recipe, hadamard)
        return values.mT, scale
    tensor = tensor.contiguous()
    element = recipe.gradient if role == "gradient" else recipe.element
    extension = multi_tensor.extension() if tensor.device.type == "cpu" else None
    draw: int | Tensor | None = None
    if recipe.stochastic and role == "gradient":
        draw = _sum_of_bits(tensor) if extension is None else extension.casts.sum_of_bits(tensor)
    if hadamard:
        if along == ROWS:  # the matrix multiplies columns
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
    """How many rows and columns of `tensor` have one scale; (0, 0): all of them, in all matrices."""
    if recipe.block is None:
        return 0, 0
    if recipe.square_weights and role == "weight":
        return recipe.block, recipe.block
    length = recipe.block or max(tensor.shape[along], 1)
    return (1, length) if along == ROWS else (length, 1)


# ---------------------------------------------------------------------------------------------------------------------
# The same in plain torch, in single steps: what csrc/casts/formats.cpp does


def quantize_plainly(
    tensor: Tensor,
    rows: int,
    columns: int,
    element: Element,
    scale: Scale,
    draw: int | Tensor | None = None,
    key: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """`tensor`, [..., R, C], in tiles of `rows` x `columns`; see `quantized`.

    Args:
        draw: for rounding by chance, the number of the draw; a tensor of shape [] has it on the device.
        key: another one gives other bits.
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
        whole = (largest.amax() if tensor.numel() else value.new_zeros(())) / element.largest / E4M3.largest
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
    """What tiles with these largest magnitudes (FP32) are divided by, and then multiplied by; FP32, of their shape.

    The second is None for 1.
    """
    finite = largest < math.inf
    if scale == "exact":
        ratio = largest / element.largest
        return torch.where(finite, torch.where(ratio > 0, ratio, 1.0), math.nan), None
    if scale == "two_levels":
        assert whole is not None
        multiply = _round(largest / element.largest / whole, E4M3)
        both = multiply * whole
        divide = torch.where(both == 0, math.inf, both)
        return torch.where(finite, divide, math.nan), torch.where(finite, multiply, math.nan)
    if scale == "up":  # to the next exponent, unless the number is a power of two
        bits = (largest / element.largest).view(torch.int32).add_(0x7FFFFF).bitwise_and_(_EXPONENT)
    else:
        bits = (largest.view(torch.int32) & _EXPONENT).sub_(int(math.log2(element.largest)) << 23)
    power = torch.where(finite, bits.clamp_(1 << 23, 254 << 23).view(torch.float32), math.nan)
    return power, power


def rounded(values: Tensor, element: Element, divide: Tensor | float = 1.0) -> Tensor:
    """FP32 `values / divide` as numbers of the format, in FP32: to nearest, ties to even, and saturating."""
    return _round(values.abs().div_(divide), element, signs=values)


def _round(value: Tensor, element: Element, random: Tensor | None = None, signs: Tensor | None = None) -> Tensor:
    """`rounded` of magnitudes, in place, in few passes and with little new memory, which is what costs on a CPU.

    torch's casts to its float8 types and back have the same bits, and take several times as long.

    Args:
        random: 16 random bits for each value (integers): it is rounded up or down by them, in proportion.
        signs: numbers whose signs the values get; None: they stay positive.
    """
    value.clamp_(max=element.largest)  # which is rounded to itself
    exponent = (value.view(torch.int32) & _EXPONENT).clamp_(min=127 + element.least_exponent << 23)
    scratch = exponent.view(torch.float32)
    if random is None:
        # Added to a number, this one leaves no room for digits below the format's last; the addition rounds them.
        exponent.add_((23 - element.mantissa << 23) + 0x400000)
        value.add_(scratch).sub_(scratch)
    else:
        exponent.sub_(element.mantissa << 23)  # the format's step there
        value.div_(scratch).add_(random * 2.0**-16).floor_().mul_(scratch)
    if signs is not None:  # copysign_ does one number at a time
        scratch.copy_(signs)
        value.view(torch.int32).bitwise_or_(exponent.bitwise_and_(-(2**31)))
    return value


def _in_tiles(tensor: Tensor, rows: int, columns: int) -> Tensor:
    """[..., R, C] as [..., down, `rows`, across, `columns`]; the last tiles are filled with zeros."""
    height, width = tensor.shape[-2:]
    if width % columns or height % rows:
        tensor = torch.nn.functional.pad(tensor, (0, -width % columns, 0, -height % rows))
    return tensor.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))


def _out_of_tiles(tiles: Tensor, height: int, width: int) -> Tensor:
    return tiles.flatten(-2).flatten(-3, -2)[..., :height, :width].contiguous()


def hadamard_plainly(tensor: Tensor) -> Tensor:
    """[..., R, C] with each 16 rows multiplied by Hadamard's matrix over 4, after some rows' signs were changed; FP32.

    R becomes a multiple of 16, by rows of zeros. The matrix is orthogonal: A.mT @ B is the same of two such tensors.
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


def _sum_of_bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16).sum(dtype=torch.int64)

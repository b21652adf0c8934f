"""Eight-bit codes of optimizers' state in plain torch, with the bits of csrc/kernels/codes.h, which describes them."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from amp_patch.multi_tensor.checks import BLOCK, CODES, SIGNED, Tensors

_DECADES = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_SMALLEST_NORMAL = 2.0**-126


class Map(NamedTuple):
    """The numbers of a map, FP32: `of_code` of each byte, shape [256]; the others as CodeMap in codes.h has them."""

    of_code: Tensor
    rate: Tensor
    start: Tensor
    limit: Tensor
    least: Tensor
    one: float


@functools.cache
def code_map(dtype: torch.dtype, device: torch.device) -> Map:
    """The map of codes of this type."""
    signed = dtype in SIGNED
    rows = [(0.0, 0.0, 0.0)]
    numbers, least = [0.0] * 256, []
    for region in range(1, 8):
        count, decade = 2 ** (region - 1 if signed else region), _DECADES[region]
        slope, offset = _fp32(0.9 * decade / count), _fp32((0.45 / count - 0.8) * decade)
        for m in range(count, 2 * count):
            numbers[m] = slope * m + offset  # rounded by the tensor below
            if signed:
                numbers[256 - m] = -numbers[m]  # of the code -m
        rows.append((count / 0.9 / decade, count * 8 / 9, 2 * count - 0.5))
        first, last_below = 0.1 + 0.45 / count, 0.1 - 0.09 / count
        least.append(decade * (first / 2 if region == 1 else (first + last_below) / 2))
    numbers[128 if signed else 1] = -1.0 if signed else 1.0
    rates, starts, limits = (_tensor(column, device) for column in zip(*rows, strict=True))
    return Map(_tensor(numbers, device), rates, starts, limits, _tensor(least, device), _fp32(1 - 0.225 / count))


def _fp32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32, device="cpu").item()


def _tensor(numbers: object, device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device="cpu").to(device)


def encode(values: Tensors, codes: Tensors, scales: Tensors) -> None:
    """`multi_tensor_encode`: writes `codes` and `scales` of FP32 `values`, in place."""
    for value, code, scale in zip(values, codes, scales, strict=True):
        if not value.numel():
            continue
        blocks = _blocks(_in_memory(value))
        if signed := code.dtype in SIGNED:
            size = blocks.abs()
        else:
            size = blocks = torch.where(blocks < 0, 0.0, blocks)
        most = size.amax(1)  # a NaN if one is there
        if signed:  # the negative of the largest; of two of one magnitude the negative one's
            negative = (blocks == -most.unsqueeze(1)).any(1)
            found = torch.where(negative, most, -most)
        else:
            found = most
        found = torch.where(most.isfinite(), found, torch.nan)
        found = torch.where(most < _SMALLEST_NORMAL, 0.0, found)
        scale.copy_(found)
        shrink = torch.where(most < 4.2535296e37, 1.0, 0.0625)  # as Inverse in codes.h, which has the reason
        inverse = 1 / (found * shrink)
        of_blocks = _codes_of(blocks * shrink.unsqueeze(1) * inverse.unsqueeze(1), code.dtype)
        of_blocks = torch.where((found.isfinite() & (found != 0)).unsqueeze(1), of_blocks, 0)
        _in_memory(code).copy_(of_blocks.reshape(-1)[: code.numel()].to(code.dtype))


def decode(codes: Tensors, values: Tensors, scales: Tensors) -> None:
    """`multi_tensor_decode`: writes FP32 `values` of `codes` and `scales`, in place."""
    for code, value, scale in zip(codes, values, scales, strict=True):
        if code.numel():
            numbers = code_map(code.dtype, code.device).of_code[_in_memory(code).view(torch.uint8).int()]
            _in_memory(value).copy_((_blocks(numbers) * scale.unsqueeze(1)).reshape(-1)[: value.numel()])


def decoded(states: Tensors, scales: Tensors) -> list[Tensor]:
    """Return the states in FP32: a dequantized copy of a quantized state, any other state itself."""
    made = [torch.empty_like(t, dtype=torch.float32) if is_coded(t) else t for t in states]
    coded = [i for i, t in enumerate(states) if is_coded(t)]
    decode([states[i] for i in coded], [made[i] for i in coded], [scales[i] for i in coded])
    return made


def encode_back(values: Tensors, states: Tensors, scales: Tensors) -> None:
    """Write those FP32 `values` whose `states` are codes into these, in place."""
    coded = [i for i, t in enumerate(states) if is_coded(t)]
    encode([values[i] for i in coded], [states[i] for i in coded], [scales[i] for i in coded])


def is_coded(tensor: Tensor) -> bool:
    """Whether the tensor is codes."""
    return tensor.dtype in CODES


def _codes_of(y: Tensor, dtype: torch.dtype) -> Tensor:
    """The codes, int32, of FP32 numbers from -1 to 1."""
    known, signed = code_map(dtype, y.device), dtype in SIGNED
    size = y.abs() if signed else y
    region = sum((size >= least).int() for least in known.least.unbind())
    m = size * known.rate[region] + known.start[region]
    limit = known.limit[region]
    code = torch.where(m < limit, m, limit).int()
    if not signed:
        return torch.where(y >= known.one, 1, code)
    return torch.where(y <= -known.one, -128, torch.where(y < 0, -code, code))


def _in_memory(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor, as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _blocks(elements: Tensor) -> Tensor:
    """In rows of a block each, the last one made up with zeros."""
    missing = -elements.numel() % BLOCK
    return torch.nn.functional.pad(elements, (0, missing)).reshape(-1, BLOCK)

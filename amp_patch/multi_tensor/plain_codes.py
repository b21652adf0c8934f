"""Optimizer state and activations in eight bits: codes and scales. csrc/kernels/codes.h describes the format.

Both give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amp_patch.multi_tensor.checks import BLOCK, CODES, KEPT, SIGNED, UNSIGNED, Tensors

_LEAST, _UNIFORM, _MOST, _NAN = 0x09000000, 0x10800000, 0x7E800000, 0x7FC00000  # bits of scales
_INFINITE, _INFINITE_CODE = 0x7F800000, 0x7F
_TOP_OF_SQUARES = 0x7800  # the bits of 2^15 in FP16
_MAGNITUDE = 0x7FFFFFFF


def encode(values: Tensors, codes: Tensors, scales: Tensors) -> None:
    """`multi_tensor_encode`: quantizes `values` into `codes` and `scales`, in place."""
    for value, code, scale in zip(values, codes, scales, strict=True):
        if not value.numel():
            continue
        is_signed = code.dtype not in UNSIGNED
        blocks = _blocks(_in_memory(value).float())
        sizes = blocks.view(torch.int32) & _MAGNITUDE
        if code.dtype in KEPT:  # numbers that become infinite are the smallest of the block but 0
            sizes = torch.where((sizes >= _MOST) & (sizes <= _INFINITE), 1, sizes)
        most = sizes.amax(1)
        least = 0 if code.dtype in SIGNED else _LEAST * (1 if code.dtype in KEPT else most.sign())
        tiny = torch.where(most < _LEAST, least, most)
        bits = torch.where(most < _MOST, tiny, _NAN)
        scale.copy_(bits.view(torch.float32))
        scaled = blocks * (_top(code.dtype) / bits.view(torch.float32)).unsqueeze(1)
        half = scaled.half().view(torch.int16).int()
        least = 0 if is_signed else torch.where(bits < _UNIFORM, _TOP_OF_SQUARES, 1 << 7).unsqueeze(1)
        if code.dtype in KEPT:
            least = sizes.sign() << 7
        made = ((half & 0x7FFF) + (scaled.view(torch.int32) & 0x7F)).clamp(min=least) >> 7
        if code.dtype in KEPT:
            made.clamp_(max=_INFINITE_CODE)
        if is_signed:
            made |= half >> 8 & 0x80
        made = torch.where(((bits > 0) & (bits < _MOST)).unsqueeze(1), made, 0).to(torch.uint8)
        _in_memory(code).copy_(made.reshape(-1)[: code.numel()].view(code.dtype))


def decode(codes: Tensors, values: Tensors, scales: Tensors) -> None:
    """`multi_tensor_decode`: dequantizes `codes` and `scales` into `values`, in place."""
    for code, value, scale in zip(codes, values, scales, strict=True):
        if code.numel():
            half = _in_memory(code).view(torch.uint8 if code.dtype in UNSIGNED else torch.int8).short() << 7
            if code.dtype not in UNSIGNED:
                half &= ~0x4000  # `short` has extended the sign of the int8 into this bit
            if code.dtype in KEPT:
                half = torch.where((half & 0x3F80) == _INFINITE_CODE << 7, (half & -0x8000) | 0x7C00, half)
            numbers = _blocks(half.view(torch.float16).float()) * (scale / _top(code.dtype)).unsqueeze(1)
            _in_memory(value).copy_(numbers.reshape(-1)[: value.numel()])


def decoded(states: Tensors, scales: Tensors) -> list[Tensor]:
    """Return the states in FP32: a dequantized copy of a quantized state, any other state itself."""
    made = [torch.empty_like(t, dtype=torch.float32) if is_coded(t) else t for t in states]
    coded = [i for i, t in enumerate(states) if is_coded(t)]
    decode([states[i] for i in coded], [made[i] for i in coded], [scales[i] for i in coded])
    return made


def encode_back(values: Tensors, states: Tensors, scales: Tensors) -> None:
    """Quantize FP32 `values` into `states` and `scales`, in place, for each index where the state is codes."""
    coded = [i for i, t in enumerate(states) if is_coded(t)]
    encode([values[i] for i in coded], [states[i] for i in coded], [scales[i] for i in coded])


def is_coded(tensor: Tensor) -> bool:
    """Tell whether `tensor` holds codes."""
    return tensor.dtype in CODES


def _top(dtype: torch.dtype) -> float:
    """Return the number to which a block's largest element is scaled before all elements are rounded to codes."""
    return 2.0**15 if dtype in UNSIGNED else 1.0


def _in_memory(tensor: Tensor) -> Tensor:
    """Return a 1-D view of a dense tensor's elements, in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _blocks(elements: Tensor) -> Tensor:
    """Return `elements` in rows of BLOCK elements; zeros fill the last row."""
    missing = -elements.numel() % BLOCK
    return torch.nn.functional.pad(elements, (0, missing)).reshape(-1, BLOCK)

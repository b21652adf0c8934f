"""Stochastic rounding in plain torch, with the bits of csrc/kernels/random.h; no sync."""

from __future__ import annotations

import torch
from torch import Tensor

_GROUP = 8  # the number of elements that get their 16 bits from one counter
_LARGEST_BF16 = 0x7F7F0000
_WORD = 0xFFFFFFFF


def philox(words: list[Tensor], key: int) -> list[Tensor]:
    """Return random words by Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    Args:
        words: the four words of the counters: int64 tensors of one shape with 32-bit values.
        key: 64 bits.

    Returns:
        Four random words, in the form of `words`.
    """
    c0, c1, c2, c3 = words
    key0, key1 = key & _WORD, key >> 32 & _WORD
    for _ in range(10):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # 64 bits, including the sign bit
        c0, c1 = (second >> 32).bitwise_xor_(c1).bitwise_xor_(key0).bitwise_and_(_WORD), second
        c2, c3 = (first >> 32).bitwise_xor_(c3).bitwise_xor_(key1).bitwise_and_(_WORD), first
        key0, key1 = key0 + 0x9E3779B9 & _WORD, key1 + 0xBB67AE85 & _WORD
    return [c0, c1 & _WORD, c2, c3 & _WORD]


def random_bits(like: Tensor, seed: int, draw: int | Tensor) -> Tensor:
    """Return 16 random bits for each element of `like`, a dense tensor: int32, with the strides of `like`.

    Args:
        seed, draw: the same pair gives the same bits. `draw` may be an int64 tensor of shape [] on the same device.
    """
    bits = torch.empty_like(like, dtype=torch.int32, requires_grad=False)
    groups = torch.arange(-(-like.numel() // _GROUP), dtype=torch.int64, device=like.device)
    draws = (torch.zeros_like(groups) + (draw >> shift & _WORD) for shift in (0, 32))
    counters = [groups & _WORD, groups >> 32, *draws]
    halves = torch.stack(philox(counters, seed), 1).to(torch.int32).view(torch.int16)  # the lower one of each first
    # Elements are numbered in memory order.
    bits.as_strided((like.numel(),), (1,)).copy_(halves.flatten()[: like.numel()])
    return bits.bitwise_and_(0xFFFF)


def stochastically_rounded(master: Tensor, like: Tensor, seed: int, draw: int) -> Tensor:
    """Return FP32 `master` rounded to BF16, as `multi_tensor_stochastic_round` does, with the strides of `like`."""
    bits = torch.where(master.isnan(), 0x7FC00000, master.view(torch.int32))
    up = torch.where((bits & 0x7FFFFFFF) < _LARGEST_BF16, random_bits(like, seed, draw), 0)
    return (bits + up >> 16).to(torch.int16).view(torch.bfloat16)

"""Checks and conversions of the arguments of `amp_C`'s functions: lists of tensors, and the overflow flag."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from amp_patch import multi_tensor
from amp_patch.optimizers.common import wide

Lists = Sequence[Sequence[Tensor]]


def lists_of(name: str, lists: Lists, *wanted: str) -> list[list[Tensor]]:
    """Return the lists. Raise unless there is one for each name in `wanted`, and all have one length."""
    given = [list(tensors) for tensors in lists]
    if len(given) != len(wanted) or len({len(tensors) for tensors in given}) > 1:
        raise ValueError(
            f"{name}: tensor_lists holds lists of {[len(tensors) for tensors in given]} tensors, wanted are "
            f"{len(wanted)} lists of one length: {', '.join(wanted)}"
        )
    return given


def flag_of(name: str, noop_flag: Any) -> Tensor:
    """Return `noop_flag` as a tensor of shape [1] that shares its memory."""
    if not isinstance(noop_flag, Tensor) or noop_flag.numel() != 1:
        raise TypeError(
            f"{name}: noop_flag is {noop_flag!r}, a tensor of one element is wanted: torch.cuda.IntTensor([0])"
        )
    return noop_flag.view(1)


@contextmanager
def raising(name: str, noop_flag: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield a `found_inf` for the kernels, on the tensors' device; at the end of the block set the flag from it."""
    flag = flag_of(name, noop_flag)
    found_inf = torch.zeros((), dtype=torch.float32, device=tensors[0].device if tensors else flag.device)
    yield found_inf
    flag.masked_fill_(found_inf.to(flag.device) != 0, 1)


def skip_flag(name: str, noop_flag: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Return 1.0 if the flag is set, otherwise 0.0, on the tensors' device: `found_inf` for torch's fused kernels."""
    flag = flag_of(name, noop_flag) != 0
    return flag.to(device=tensors[0].device if tensors else flag.device, dtype=torch.float32)


def multiplied(tensors: Sequence[Tensor], factor: float | Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return `tensors * factor` as new tensors, FP64 where the tensor of `like` is FP64, else FP32."""
    results = [torch.empty_like(t, dtype=wide(other.dtype)) for t, other in zip(tensors, like, strict=True)]
    multi_tensor.multi_tensor_scale(tensors, results, factor)
    return results


def publish_unless(masters: Sequence[Tensor], copies: Sequence[Tensor], skipped: Tensor) -> None:
    """Round the masters into their low-precision copies, in place, unless `skipped` is not 0; no sync."""
    for master, copy in zip(masters, copies, strict=True):
        copy.copy_(torch.where(skipped != 0, copy, master.to(copy.dtype)))

"""`Recycled`, a block of memory that successive tensors reuse, because new memory is slow on a CPU.

`holders` counts the references to a storage.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# From this many bytes on, the CPU allocator takes each block from the system, and returns it when it is freed. At the
# first write the system maps a new block page by page, which takes up to ten times as long as the write itself.
_WORTH_KEEPING = 2**16

_use_count = getattr(torch._C, "_storage_Use_Count", None)  # absent from CPU builds of old torch: nothing is reused


class Recycled:
    """One block of FP32 memory on a CPU that is reused for successive tensors of one size, one at a time.

    The block is reused only if nothing references it any more: no tensor, view, array, graph or other process.
    Otherwise a new block is allocated, as by `torch.empty_like`, and kept for the next tensor. On other devices nothing
    is reused, because torch caches their memory.
    """

    __slots__ = ("_pointer", "_storage")

    def __init__(self) -> None:
        self._storage: torch.UntypedStorage | None = None
        self._pointer = 0

    def empty_like(self, like: Tensor) -> Tensor:
        """Return an uninitialized FP32 tensor with the shape and device of `like`."""
        if 4 * like.numel() >= _WORTH_KEEPING and like.device.type == "cpu" and _is_dense(like):
            return self._empty(like.shape, like.stride())
        return torch.empty_like(like, dtype=torch.float32)

    def flat(self, count: int) -> Tensor:
        """Return an uninitialized FP32 tensor of `count` elements on the CPU."""
        return self._empty((count,), (1,))

    def _empty(self, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
        if self._is_free(4 * math.prod(shape)):
            assert self._storage is not None
            return torch.empty(0, dtype=torch.float32, device="cpu").set_(self._storage, 0, shape, stride)
        result = torch.empty_strided(shape, stride, dtype=torch.float32, device="cpu")
        if _use_count is not None:
            self._storage = result.untyped_storage()
            self._pointer = self._storage.data_ptr()
        return result

    def _is_free(self, size: int) -> bool:
        return (
            self._storage is not None
            and _use_count(self._storage._cdata) == 1  # type: ignore[misc]  # no tensor references it, so no view or array does
            and sys.getrefcount(self._storage) == 2  # this attribute and getrefcount's argument
            and self._storage.data_ptr() == self._pointer  # neither resized nor moved into shared memory
            and self._storage.nbytes() == size
        )


def holders(storage: Any) -> tuple[int, int]:
    """Return (number of C++ references to the storage, number of references to its Python object)."""
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


@functools.cache
def lone_holders() -> tuple[int, int]:
    """Return `holders` of a storage with one tensor and one Python variable. Higher counts mean further references."""
    alone = torch.empty(1, dtype=torch.float32, device="cpu")
    storage = alone.untyped_storage()
    return holders(storage)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)

"""Memory that successive gradients are made in, because fresh memory is slow on a CPU; and who holds some memory."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Blocks of at least this many bytes a CPU's allocator takes from the system and gives back. The system maps a new block
# page by page at the first write, and that takes up to ten times as long as the write itself.
_WORTH_KEEPING = 2**16

_use_count = getattr(torch._C, "_storage_Use_Count", None)  # absent from CPU builds of old torch: nothing is kept


class Recycled:
    """One block of FP32 memory on a CPU that successive tensors of one shape are made in, one at a time.

    A tensor is made in the memory of the one before it only if nobody can tell: no tensor, view, array, graph or other
    process holds that any more. Else it gets memory of its own, as from `torch.empty_like`. On other devices nothing is
    kept: torch has a cache for their memory.
    """

    __slots__ = ("_pointer", "_storage")

    def __init__(self) -> None:
        self._storage: torch.UntypedStorage | None = None
        self._pointer = 0

    def empty_like(self, like: Tensor) -> Tensor:
        """An uninitialized FP32 tensor of the shape and the device of `like`."""
        if 4 * like.numel() >= _WORTH_KEEPING and like.device.type == "cpu" and _is_dense(like):
            return self._empty(like.shape, like.stride())
        return torch.empty_like(like, dtype=torch.float32)

    def flat(self, count: int) -> Tensor:
        """An uninitialized FP32 tensor of `count` elements on the CPU."""
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
            and _use_count(self._storage._cdata) == 1  # type: ignore[misc]  # no tensor, so no view and no array either
            and sys.getrefcount(self._storage) == 2  # this attribute, and the argument of getrefcount
            and self._storage.data_ptr() == self._pointer  # neither resized nor moved into shared memory
            and self._storage.nbytes() == size
        )


def holders(storage: Any) -> tuple[int, int]:
    """How many tensors, views and the like hold this memory, and how many the object that Python has of it."""
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


@functools.cache
def lone_holders() -> tuple[int, int]:
    """The holders of a storage that is one tensor's, and that one variable has."""
    alone = torch.empty(1, dtype=torch.float32, device="cpu")
    storage = alone.untyped_storage()
    return holders(storage)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)

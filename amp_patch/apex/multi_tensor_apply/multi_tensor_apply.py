"""MultiTensorApply, a callable that passes lists of tensors to a function of `amp_C`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["MultiTensorApply"]


class MultiTensorApply:
    """A callable that calls `op(chunk_size, noop_flag_buffer, tensor_lists, *args)`.

    Attributes:
        available: True. (In Apex it is False if Apex was built without extensions.)
        warned: False, as in Apex.
        chunk_size: passed to each call of `op`.
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Do nothing: the functions are always available. (Apex raises if it was built without extensions.)"""

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
    ) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)

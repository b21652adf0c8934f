"""What is asked of many tensors at once, in C++ where the extension is: csrc/masters/gradients.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from amp_patch import multi_tensor


def with_gradient(tensors: list[Any]) -> Sequence[int]:
    """The indices of those `tensors` whose `.grad` is there; of a master what waits for it does not count."""
    kernels = multi_tensor.extension()
    if kernels is not None:
        indices: list[int] = kernels.with_gradient(tensors)
        return indices
    return [index for index, tensor in enumerate(tensors) if tensor.grad is not None]


def drop_gradients(tensors: list[Tensor]) -> None:
    """Set the `.grad` of `tensors` to None; what waits for a master stays."""
    kernels = multi_tensor.extension()
    if kernels is not None:
        kernels.drop_gradients(tensors)
        return
    for tensor in tensors:
        tensor.grad = None

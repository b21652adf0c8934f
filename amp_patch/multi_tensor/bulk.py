"""The gradient fields of many tensors at once, in C++ where the extension is: csrc/masters/gradients.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from amp_patch.multi_tensor import backends

# Autograd's own field: the attribute `grad` of a parameter with a master is that master's (masters/grad_route.py).
GRAD: Any = Tensor.grad


def with_gradient(tensors: list[Any]) -> Sequence[int]:
    """The indices of those `tensors` that have a gradient of their own.

    A gradient that waits in low precision for a master is not in that master's field yet.
    """
    if (kernels := backends.active) is not None:
        indices: list[int] = kernels.with_gradient(tensors)
        return indices
    return [index for index, tensor in enumerate(tensors) if GRAD.__get__(tensor) is not None]


def drop_gradients(tensors: list[Tensor]) -> None:
    """Set the gradients that `with_gradient` finds to None, in place; those that wait for a master stay."""
    if (kernels := backends.active) is not None:
        kernels.drop_gradients(tensors)
        return
    for tensor in tensors:
        GRAD.__set__(tensor, None)

"""What is asked of many tensors at once, in C++ where the extension is: csrc/masters/gradients.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from amp_patch.masters.master import own_grad, set_own_grad
from amp_patch.multi_tensor import backends


def with_gradient(tensors: list[Any]) -> Sequence[int]:
    """The indices of those `tensors` that have a gradient of their own.

    What waits for a master is not its own yet; nor is a gradient of the master's the parameter's.
    """
    if (kernels := backends.active) is not None:
        indices: list[int] = kernels.with_gradient(tensors)
        return indices
    return [index for index, tensor in enumerate(tensors) if own_grad(tensor) is not None]


def drop_gradients(tensors: list[Tensor]) -> None:
    """Set the gradients that `with_gradient` finds to None; what waits for a master stays."""
    if (kernels := backends.active) is not None:
        kernels.drop_gradients(tensors)
        return
    for tensor in tensors:
        set_own_grad(tensor, None)

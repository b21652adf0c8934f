"""The gradient field that autograd fills, of one tensor or of many at once; in C++ if the extension is built.

For a parameter with a master the attribute `grad` returns the master's gradient (grad_route.py), not this field. The
C++ is in csrc/masters/gradients.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp_patch.multi_tensor import backends

GRAD: Any = Tensor.grad


def own_grad(tensor: Tensor) -> Tensor | None:
    """Return the gradient in the field that autograd fills, even if the attribute `grad` is redirected."""
    grad: Tensor | None = GRAD.__get__(tensor)
    return grad


def set_own_grad(tensor: Tensor, grad: Tensor | None) -> None:
    """Write the field that autograd fills, even if the attribute `grad` is redirected to a master."""
    GRAD.__set__(tensor, grad)


def with_gradient(tensors: list[Any]) -> Sequence[int]:
    """Return the indices of the `tensors` whose field has a gradient.

    A deferred gradient of a master is not in the field.
    """
    if (kernels := backends.active) is not None:
        indices: list[int] = kernels.with_gradient(tensors)
        return indices
    return [index for index, tensor in enumerate(tensors) if GRAD.__get__(tensor) is not None]


def plain_gradients(params: list[Tensor]) -> list[Tensor] | None:
    """Return the gradients in the fields of `params`, or None if one is sparse, complex or on another device."""
    if (kernels := backends.active) is not None:
        return kernels.plain_gradients(params)
    grads = [grad for param in params if (grad := GRAD.__get__(param)) is not None]
    return grads if len({grad.device for grad in grads}) < 2 and all(map(_is_plain, grads)) else None


def _is_plain(grad: Tensor) -> bool:
    if type(grad) is not Tensor or grad.layout is not torch.strided or grad.requires_grad or grad.is_complex():
        return False
    return not (grad.is_neg() or grad.is_conj())


def drop_gradients(tensors: list[Tensor]) -> None:
    """Set the fields that `with_gradient` finds to None; deferred gradients stay."""
    if (kernels := backends.active) is not None:
        kernels.drop_gradients(tensors)
        return
    for tensor in tensors:
        GRAD.__set__(tensor, None)

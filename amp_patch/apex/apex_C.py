"""Apex's compiled module `apex_C`: several tensors as one, and back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """All elements one after another: a new tensor of shape [sum of numel]. One dtype and device."""
    return _flatten_dense_tensors(tensors)


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Views of `flat` with the shapes of `tensors`, in order."""
    return _unflatten_dense_tensors(flat, tensors)

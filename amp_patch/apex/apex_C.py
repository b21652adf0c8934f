"""Apex's compiled module `apex_C`: functions that flatten several tensors into one, and back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return a new tensor of shape [sum of numel] with the elements of all tensors, of one dtype and device."""
    return _flatten_dense_tensors(tensors)


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return views of `flat` with the shapes of `tensors`, in order."""
    return _unflatten_dense_tensors(flat, tensors)

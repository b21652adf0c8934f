"""Lists of tensors grouped by device (a kernel takes the tensors of one device), and devices without FP64."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor


def by_device(rows: Iterable[tuple[Tensor, ...]]) -> dict[torch.device, list[list[Tensor]]]:
    """Return {device: columns} of the rows whose first tensor is there: rows (param, grad) give [params, grads]."""
    groups: dict[torch.device, list[tuple[Tensor, ...]]] = {}
    for row in rows:
        groups.setdefault(row[0].device, []).append(row)
    return {device: [list(column) for column in zip(*some, strict=True)] for device, some in groups.items()}


@functools.cache
def widest(device: torch.device) -> torch.dtype:
    """Return torch.float64, or torch.float32 if the device has no FP64."""
    try:
        torch.ones((), dtype=torch.float64, device=device).add_(1)  # some devices store FP64, and compute in FP32 only
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64

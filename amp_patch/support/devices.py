"""Lists of tensors grouped by device: a kernel takes the tensors of one device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def by_device(rows: Iterable[tuple[Tensor, ...]]) -> dict[torch.device, list[list[Tensor]]]:
    """Return {device: columns} of the rows whose first tensor is there: rows (param, grad) give [params, grads]."""
    groups: dict[torch.device, list[tuple[Tensor, ...]]] = {}
    for row in rows:
        groups.setdefault(row[0].device, []).append(row)
    return {device: [list(column) for column in zip(*some, strict=True)] for device, some in groups.items()}

"""Lists of tensors, apart for each device: a kernel takes those of one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def by_device(rows: Iterable[tuple[Tensor, ...]]) -> dict[torch.device, list[list[Tensor]]]:
    """Device of a row's first tensor -> the columns of its rows, in order: (param, grad), ... gives [params, grads]."""
    groups: dict[torch.device, list[tuple[Tensor, ...]]] = {}
    for row in rows:
        groups.setdefault(row[0].device, []).append(row)
    return {device: [list(column) for column in zip(*some, strict=True)] for device, some in groups.items()}

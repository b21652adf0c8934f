"""Snapshots of torch's namespaces, to test whether anything was replaced in them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def namespaces() -> dict[str, dict[str, Any]]:
    owners: list[Any] = [
        torch, torch.Tensor, torch.nn.functional, torch._VF, torch.linalg, torch.special, torch.fft, torch.functional,
        nn.RNNBase, nn.DataParallel, torch.backends.mha,
        torch.utils.checkpoint, torch.utils.checkpoint.CheckpointFunction,
    ]  # fmt: skip
    return {repr(owner): dict(vars(owner)) for owner in owners}


def differences(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[str]:
    missing = object()
    return [
        f"{owner}.{name}"
        for owner in before
        for name in {*before[owner], *after[owner]}
        if before[owner].get(name, missing) is not after[owner].get(name, missing)
    ]

"""Apex's lists of methods of `torch.Tensor`: see the package's docstring."""

from __future__ import annotations

import torch

from amp_patch.apex.amp.lists._from_oplists import casts_of

__all__ = ["CASTS", "FP16_FUNCS", "FP32_FUNCS", "MODULE", "SEQUENCE_CASTS"]

ADDRESS = "torch.Tensor"
MODULE = torch.Tensor

FP16_FUNCS, FP32_FUNCS, CASTS = casts_of(ADDRESS)
SEQUENCE_CASTS: list[str] = []

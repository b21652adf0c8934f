"""Apex's lists of functions of `torch.nn.functional`: see the package's docstring."""

from __future__ import annotations

import torch.nn.functional

from amp_patch.apex.amp.lists._from_oplists import banned, casts_of

__all__ = ["BANNED_FUNCS", "FP16_FUNCS", "FP32_FUNCS", "MODULE"]

ADDRESS = "torch.nn.functional"
MODULE = torch.nn.functional

FP16_FUNCS, FP32_FUNCS, _ = casts_of(ADDRESS)
BANNED_FUNCS = banned(ADDRESS)

"""Regions of casts, and the type of a product in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

from amp_patch import amp

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32
a = torch.ones(2, 2)

# Who has the word tells the type of a product: ours FP16, torch's BF16.
KINDS: dict[str, tuple[Callable[[], Any], torch.dtype]] = {
    "ours": (lambda: amp.autocast("cpu", HALF), HALF),
    "ours, off": (lambda: amp.autocast("cpu", enabled=False), FULL),
    "disable_casts": (lambda: amp.disable_casts(), FULL),
    "torch's": (lambda: torch.autocast("cpu", BF16), BF16),
    "torch's, off": (lambda: torch.autocast("cpu", enabled=False), FULL),
}


@pytest.fixture(name="default")
def default_fixture(request: pytest.FixtureRequest) -> torch.dtype:
    """The process default of that level; the type of a product outside of all regions."""
    if request.param is None:
        return FULL
    amp.initialize(nn.Linear(1, 1), opt_level=request.param)
    return HALF


def product() -> torch.dtype:
    made = a @ a
    linear = F.linear(a, a)
    assert made.dtype is linear.dtype and torch.equal(made, linear)
    return made.dtype

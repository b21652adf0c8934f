"""Calls of amp_C as Apex's own code makes them."""

from __future__ import annotations

import pytest
import torch
from conftest import DEVICES

CHUNK = 2048 * 32
SHAPES = [(3, 5), (7,), (2, 3, 4), (1,)]
on_devices = pytest.mark.parametrize("device", DEVICES)


def tensors(seed=0, dtype=torch.float32, device="cpu", shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(device, dtype) for s in shapes]


def buffer(device="cpu", dtype=torch.int32, value=0):
    return torch.full((1,), value, dtype=dtype, device=device)


def zeros(dtype=torch.float32):
    return [torch.zeros_like(t) for t in tensors(dtype=dtype)]

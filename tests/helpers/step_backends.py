"""Kernels of steps as optimizers call them: under no_grad."""

from __future__ import annotations

import pytest
import torch

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(name="no_grad", autouse=True)
def no_grad_fixture():
    with torch.no_grad():
        yield

"""Policies and calls for FP16 on a CPU without arithmetic of that type."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from amp_patch.casts import install
from amp_patch.policy import Policy

FP16 = torch.float16
ONLY_EMULATES = Policy("O2", cast_model_type=FP16, cpu_fp16="emulate")
O1 = Policy("O1", patch_torch_functions=True, cpu_fp16="emulate")
POLICIES = [pytest.param(ONLY_EMULATES, id="O2"), pytest.param(O1, id="O1")]


# torch's flash attention has no double backward, in no type.
def double_differentiable():
    return sdpa_kernel(SDPBackend.MATH)


@pytest.fixture(name="installed")
def installed_fixture():
    install.install()
    yield
    install.uninstall()


def half(*shape: int) -> Tensor:
    return torch.randn(shape).half().requires_grad_()

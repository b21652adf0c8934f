"""Policies and calls for FP16 and BF16 on a CPU without arithmetic of that type."""

from __future__ import annotations

import pytest
import torch
import wrapper_backends
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from amp_patch import amp
from amp_patch.casts import cpu_half, install
from amp_patch.casts.wrappers import backend
from amp_patch.policy import LOW_PRECISION, Policy

FP16 = torch.float16
NAMES = {torch.float16: "FP16", torch.bfloat16: "BF16"}


def only_emulates(dtype: torch.dtype) -> Policy:
    return Policy("O2", dtype=dtype, cast_model_type=dtype, cpu_half="emulate")


def o1(dtype: torch.dtype) -> Policy:
    return Policy("O1", dtype=dtype, patch_torch_functions=True, cpu_half="emulate")


ONLY_EMULATES = only_emulates(FP16)
POLICIES = [
    pytest.param(policy(dtype), id=f"{policy(dtype).opt_level} {NAMES[dtype]}")
    for policy in (only_emulates, o1)
    for dtype in LOW_PRECISION
]


# torch's flash attention has no double backward, in no type.
def double_differentiable():
    return sdpa_kernel(SDPBackend.MATH)


@pytest.fixture(name="installed", params=["cpp", "python"] if backend() == "cpp" else ["python"])
def installed_fixture(request):
    """Casts and kernels of one kind: the kernels of the extension, or the kernels in Python."""
    with wrapper_backends.use_backend(request.param):
        install.install()
        for dtype in LOW_PRECISION:
            cpu_half.emulate(only_emulates(dtype))
        yield
        amp.restore()


def half(*shape: int, dtype: torch.dtype = FP16) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()

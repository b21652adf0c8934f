"""Tests of kernels on each backend and instruction set, the tensors that they are given, and steps under no_grad."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import DEVICES, DTYPES

from amp_patch import multi_tensor as mt
from amp_patch.multi_tensor import backends

INF, NAN = math.inf, math.nan

ALL_DTYPES = [*DTYPES, torch.float64]


# On "cpp" a test runs with the best of the CPU's instruction sets, one marked `on_every_set` with each of them.
BACKENDS = [b for b in backends.BACKENDS if b == "torch" or mt.backend() == "cpp"]
SETS = backends._C.instruction_sets() if "cpp" in BACKENDS else []


@pytest.fixture(name="backend", params=BACKENDS, autouse=True)
def backend_fixture(request):
    name, _, instructions = request.param.partition("-")
    with mt.use_backend(name):
        before = backends._C.use_instruction_set(instructions or SETS[-1]) if name == "cpp" else None
        try:
            yield name
        finally:
            if before is not None:
                backends._C.use_instruction_set(before)


on_every_set = pytest.mark.parametrize(
    "backend", [*(f"cpp-{name}" for name in SETS), *(["torch"] if "torch" in BACKENDS else [])], indirect=True
)


device = pytest.mark.parametrize("device", DEVICES)

# Settings of the kernels of steps.
ADAM = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}
SGD = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}


def draw(sizes, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [size if isinstance(size, tuple) else (size,) for size in sizes]
    return [(torch.randn(shape, generator=generator) * 100).to(device, dtype) for shape in shapes]


def flag(device="cpu"):
    return torch.zeros((), device=device)


def versions(tensors):
    return [t._version for t in tensors]


def scaler(scale, device="cpu", tracker=0):
    return torch.tensor([scale], device=device), torch.tensor([tracker], dtype=torch.int32, device=device)


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(name="no_grad", autouse=True)
def no_grad_fixture():
    with torch.no_grad():
        yield

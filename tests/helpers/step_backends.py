"""Kernels of steps on each backend and instruction set."""

from __future__ import annotations

import pytest
import torch
from conftest import DEVICES

from amp_patch import multi_tensor as mt
from amp_patch.multi_tensor import backends

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
BACKENDS = [b for b in backends.BACKENDS if b == "torch" or mt.backend() == "cpp"]
SETS = backends._C.instruction_sets() if "cpp" in BACKENDS else []


@pytest.fixture(name="backend", params=BACKENDS, autouse=True)
def backend_fixture(request):
    name, _, instructions = request.param.partition("-")
    with mt.use_backend(name), torch.no_grad():
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

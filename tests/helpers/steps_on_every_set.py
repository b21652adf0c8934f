"""Kernels of steps on each backend and instruction set, under no_grad; what the steps of these tests are given."""

from __future__ import annotations

import pytest
import torch
from conftest import DEVICES
from on_every_backend import SETS

from amp_patch import multi_tensor as mt
from amp_patch.multi_tensor import backends

ADAM = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "decoupled": True}
SGD = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}

device = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(name="backend", params=[*(f"cpp-{name}" for name in SETS), "torch"], autouse=True)
def backend_fixture(request):
    name, _, instructions = request.param.partition("-")
    with mt.use_backend(name), torch.no_grad():
        before = backends._C.use_instruction_set(instructions) if name == "cpp" else None
        try:
            yield name
        finally:
            if before is not None:
                backends._C.use_instruction_set(before)

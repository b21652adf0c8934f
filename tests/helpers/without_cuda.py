"""Code for CUDA on a machine without CUDA."""

from __future__ import annotations

import pytest
import torch

from amp_patch.lab.commands import no_cuda


@pytest.fixture(name="cpu")
def cpu_fixture(request):
    no_cuda.install()
    yield
    no_cuda.uninstall()


def on_cpu(*tensors: torch.Tensor) -> bool:
    return all(tensor.device.type == "cpu" for tensor in tensors)

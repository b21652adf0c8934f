"""Optimizers of tensors that no module with a forward owns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from amp_patch.lab.unedited.loose_tensors import steps_loose_tensors


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_a_scripted_module_owns_its_parameters_and_no_loose_tensor():
    scripted = torch.jit.script(nn.Linear(2, 2))
    temperature = torch.zeros((), requires_grad=True)
    assert steps_loose_tensors(torch.optim.SGD([temperature], lr=1.0))
    assert not steps_loose_tensors(torch.optim.SGD(scripted.parameters(), lr=1.0))

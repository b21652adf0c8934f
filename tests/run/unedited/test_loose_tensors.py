"""Optimizers of tensors that no module with a forward owns."""

from __future__ import annotations

import pytest
import torch
from scripts import run_source
from torch import nn

from amp_patch import amp
from amp_patch.run.unedited.loose_tensors import steps_loose_tensors
from amp_patch.run.unedited.refusal import ScriptRefused
from amp_patch.run.unedited.script import UneditedScript


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
def test_a_scripted_module_owns_its_parameters_and_no_loose_tensor():
    scripted = torch.jit.script(nn.Linear(2, 2))
    temperature = torch.zeros((), requires_grad=True)
    assert steps_loose_tensors(torch.optim.SGD([temperature], lr=1.0))
    assert not steps_loose_tensors(torch.optim.SGD(scripted.parameters(), lr=1.0))


# openai's improved-diffusion with --use_fp16.
OWN_MASTERS = """
import copy
import torch
from torch import nn

model = nn.Linear(4, 2).to(torch.LOW)
MASTERS
optimizer = torch.optim.AdamW(masters, lr=1e-3)
for step in range(2):
    model(torch.ones(2, 4, dtype=torch.LOW)).float().sum().backward()
    for master, param in zip(masters, model.parameters()):
        master.grad = param.grad.float()
    optimizer.step()
"""
TENSORS = "masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]"
MODULE = "held = copy.deepcopy(model).float(); masters = list(held.parameters())"
BESIDE = f"""
other = nn.Linear(2, 2)
beside = torch.optim.SGD(other.parameters(), lr=0.1)
other(torch.ones(2)).sum().backward()
beside.step()
{TENSORS}
"""


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
@pytest.mark.parametrize("masters", [TENSORS, MODULE, BESIDE])
@pytest.mark.parametrize("low", ["float16", "bfloat16"])
def test_a_script_with_masters_of_its_own_is_told_to_turn_them_off(low, masters, level):
    with pytest.raises(ScriptRefused) as caught, UneditedScript(level):
        run_source(OWN_MASTERS.replace("LOW", low).replace("MASTERS", masters))
    amp.restore()
    said = str(caught.value)
    assert "mixed precision of its own: the AdamW here holds masters of FP16 or BF16 weights (train.py, line" in said
    assert "the script's own option" in said and "initialize" not in said

"""What torch.autocast casts by itself in scripts that know torch alone, and our levels cast too."""

from __future__ import annotations

import pytest
import torch
from training import LEVELS
from unedited import run_source

from amp_patch.casts import install
from amp_patch.lab.unedited.script import UneditedScript

IMPORTS = """
import torch
from torch import einsum, nn
from torch.nn import functional as F
from torch.nn.functional import linear, softmax

torch.manual_seed(0)
losses, types = [], []

class Net(nn.Module):
    soft = staticmethod(F.softmax)

    def __init__(self):
        super().__init__()
        self.weight, self.act = nn.Parameter(torch.randn(4, 4) / 4), F.softplus

    def forward(self, x, last=torch.exp):
        x = linear(einsum("ij,jk->ik", x, self.weight), self.weight)
        types.append([x.dtype, softmax(x, -1).dtype, self.act(x).dtype])
        return softmax(x, -1) + self.soft(x, -1) + self.act(x) + last(x)

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(3):
    loss = F.mse_loss(net(torch.randn(8, 4)), torch.ones(8, 4))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
"""
BY_ATTRIBUTE = IMPORTS.replace("linear(einsum(", "F.linear(torch.einsum(").replace("softmax(x", "F.softmax(x")
BY_ATTRIBUTE = BY_ATTRIBUTE.replace("self.soft(", "F.softmax(").replace("self.act(", "F.softplus(")
BY_ATTRIBUTE = BY_ATTRIBUTE.replace("last(x)", "torch.exp(x)").replace("F.F.", "F.")


def run(script: str, level: str) -> dict[str, object]:
    with UneditedScript(level):
        return run_source(script)


@pytest.mark.parametrize("level", LEVELS)
def test_functions_imported_by_name_are_those_of_torchs_namespace(level: str) -> None:
    found, wanted = run(IMPORTS, level), run(BY_ATTRIBUTE, level)
    assert found["types"] == wanted["types"] and torch.equal(
        torch.stack(found["losses"]), torch.stack(wanted["losses"])
    )
    if level in ("O1", "O4"):
        low = torch.float16 if level == "O1" else torch.bfloat16
        assert found["types"] == [[low, torch.float32, torch.float32]] * 3


def test_casts_are_there_for_the_imports_and_gone_after_a_script_that_trained_nothing() -> None:
    functional = torch.nn.functional
    before = functional.linear
    with UneditedScript("O1"):
        assert functional.linear is not before
        assert functional.linear(torch.ones(1, 2), torch.ones(1, 2)).dtype is torch.float32, "no level acts yet"
    assert functional.linear is before and not install.installed()
    for level in ("O0", "O2"):
        with UneditedScript(level):
            assert functional.linear is before

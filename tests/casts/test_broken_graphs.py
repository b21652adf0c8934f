"""Graphs that break inside a region: the rest of the forward runs as plain Python, with eager's casts and numbers."""

from __future__ import annotations

from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.symbolic_convert
from torch import Tensor, nn
from torch.nn import functional as F
from training import ADAM, LEVELS, iterate, same

import amp_patch
from amp_patch import amp
from amp_patch.casts import dynamo

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    # What torch's own tracing does, in plain scripts too.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit"),
]


class Breaking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x


class Own(nn.Module):
    """A module of the user's, which Dynamo compiles by itself where the graph around it broke."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(F.linear(x, self.weight), -1).exp() @ self.weight


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), Breaking(), Own(), nn.Linear(8, 8), nn.GELU(), Own())


def weights(level: str, compiled: bool) -> list[Tensor]:
    model = network()
    model, optimizer = amp.initialize(
        model, ADAM(model.parameters()), opt_level=level, cpu_half="emulate", verbosity=0, loss_scale=64.0
    )
    called = torch.compile(model, backend="aot_eager") if compiled else model

    def loss_of(step: int) -> Tensor:
        return called(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).float().square().mean()

    iterate(optimizer, loss_of, range(3))
    amp.restore()
    return [value.clone() for value in model.state_dict().values()]


@pytest.fixture
def traced(monkeypatch) -> list[CodeType]:
    """The code of all frames that Dynamo has traced by themselves."""
    dynamo.hook()  # once for the process: under the patch below, its own of `run` would go with that
    found: list[CodeType] = []
    translator = torch._dynamo.symbolic_convert.InstructionTranslator
    run = translator.run

    def noted(self: Any) -> Any:
        found.append(self.f_code)
        return run(self)

    monkeypatch.setattr(translator, "run", noted)
    return found


SLOW = ("O0", "O3", "O4")


@pytest.mark.parametrize(
    "level", [pytest.param(level, marks=[pytest.mark.slow] if level in SLOW else []) for level in LEVELS]
)
def test_a_graph_that_breaks_inside_of_the_model_trains_as_in_eager(wrappers, level, traced):
    expected = weights(level, compiled=False)
    found = weights(level, compiled=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    # Of amp_patch's own code what stands around the user's forward, and nothing that is called in it.
    ours = [code for code in traced if Path(code.co_filename).is_relative_to(Path(amp_patch.__file__).parent)]
    assert {code.co_name for code in ours} == {"entering"}
    assert any(code is Own.forward.__code__ for code in traced), "the user's module is compiled"
    assert not same(found, [value.clone() for value in network().state_dict().values()])

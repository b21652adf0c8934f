"""explain under torch.autocast, for a model without `initialize`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from amp_patch import explain

BF16, FP32 = torch.bfloat16, torch.float32


class Functions(nn.Module):
    """A linear layer, and two functions of its output. Autocast on a CPU computes the second one in FP32."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        made = self.layer(x)
        return F.relu(made), F.mse_loss(made, made)


def test_functions_that_autocast_casts_are_marked_with_the_types_they_ran_in():
    with torch.autocast("cpu", BF16):
        found = explain(Functions(), torch.ones(1, 2))
    assert [(call.op.rpartition(".")[2], call.ran, call.gave, call.decided) for call in found.calls] == [
        ("linear", (BF16, BF16, BF16), (BF16,), "torch.autocast"),
        ("relu", (BF16,), (BF16,), "none: torch's own promotion"),
        ("mse_loss", (FP32, FP32), (FP32,), "torch.autocast"),
    ]
    assert str(found).startswith("torch.autocast: bfloat16 on cpu\n")


def test_without_autocast_nothing_is_marked():
    found = explain(Functions(), torch.ones(1, 2))
    assert {call.decided for call in found.calls} == {"none: torch's own promotion"}
    assert str(found).startswith("no policy: ")

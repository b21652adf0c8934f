"""The advice of `inspect` fits the inspected level."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amp_patch as amp
from amp_patch.diagnose.inspect import inspect

LEVELS_OF_BF16 = ["O4", "O5", "O6", "O7"]


class Exponential(nn.Module):
    """Model whose forward makes an infinity itself, so that no module inside it can be kept in FP32 instead."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear((x + 1e4).exp())


def summary_of(model, level, inputs):
    """Inspect one step of the model at the level. Return the summary and the inspection."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with inspect(model, optimizer) as seen:
        with amp.scale_loss(model(inputs).float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    return str(seen), seen


def wide():
    """Return a layer and an input: at every loss scale, FP16 loses three of the four gradient values."""
    return nn.Sequential(nn.Linear(4, 1, bias=False)), torch.tensor([[2.0**-60, 2.0**-60, 2.0**-60, 1.0]])


@pytest.mark.parametrize("level", ["O5", "O7"])  # O4's and O6's exp is FP32, and the infinity meets BF16 behind it
def test_inspect_does_not_advise_bfloat16_at_bf16_levels(level):
    said, seen = summary_of(Exponential(), level, torch.zeros(2, 4))
    assert seen.not_finite.remedy == ()
    assert "dtype=torch.bfloat16" not in said and "BF16 has FP32's range, so look whether O0 makes it too" in said


@pytest.mark.parametrize(("level", "advice"), [("O2", "try dtype=torch.bfloat16"), ("O0", "FP32 made it")])
def test_inspect_advises_bfloat16_for_an_infinity_that_only_fp16_makes(level, advice):
    said, _ = summary_of(Exponential(), level, torch.zeros(2, 4))
    assert advice in said


@pytest.mark.parametrize("level", LEVELS_OF_BF16)
def test_inspect_keeps_no_module_for_fp16_losses_at_bf16_levels(level):
    model, inputs = wide()
    said, seen = summary_of(model, level, inputs)
    assert seen.gradients["0.weight"].flushed(seen.best_scale()) == 0.75
    assert seen.keep_fp32() == [] and "FP16" not in said and "best" not in said


def test_inspect_reports_fp16_losses_at_o0():
    model, inputs = wide()
    said, seen = summary_of(model, "O0", inputs)
    assert seen.keep_fp32() == ["0"] and "share of gradients that FP16 loses" in said and "the best one" in said


def test_inspect_advises_a_smaller_loss_scale_only_above_1():
    seen = summary_of(Exponential(), "O2", torch.zeros(2, 4))[1]
    backward = type(seen.not_finite)("linear", "linear", "backward", 0, (0.0, 1.0))
    for scale, advice in ((2.0**16, "try a smaller loss scale"), (1.0, "try dtype=torch.bfloat16")):
        seen.not_finite, seen.scale = backward, scale
        assert advice in str(seen)


def test_inspect_advises_keep_high_at_levels_with_fp4_products():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1))
    torch.manual_seed(0)
    said, seen = summary_of(model, "O6+nvfp4", torch.randn(32, 64))
    assert seen.keep_fp32() and set(seen.keep_fp32()) <= {"1", "2"}, "FP4 is far off; the ends are BF16 by themselves"
    assert said.endswith(f"keep_high={['0', '3', *seen.keep_fp32()]}") and "keep_fp32=" not in said

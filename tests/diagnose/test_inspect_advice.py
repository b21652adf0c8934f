"""The advice of `inspect` fits the inspected level."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import training
from conftest import DEVICES
from inspected import PLANTED, look_deep
from torch import nn

import amp_patch as amp
from amp_patch.diagnose.histogram import Histogram
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


# ---------------------------------------------------------------------------------------------------------------------
# The modules that are named for overflows and flushes, and the keep lists that remove them


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("direction", PLANTED)
def test_the_keep_list_of_inspect_removes_an_overflow(direction, level, device):
    factors, weight, module, span = PLANTED[direction]
    seen, finite = look_deep(level, device, factors, weight)
    found = seen.not_finite
    assert (found.module, found.op, found.direction, found.step) == (module, "linear", direction, 1)
    assert found.input_range == span
    keep = seen.keep_fp32()
    # In a cast model, a kept layer returns FP16, so a value between two layers needs their whole block in FP32.
    assert keep == (["block.1", "block.2" if direction == "forward" else "block.0"] if level == "O1" else ["block"])
    assert not finite
    seen, finite = look_deep(level, device, factors, weight, keep_fp32=keep)
    assert seen.not_finite is None
    assert finite


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_the_keep_list_names_the_module_that_runs_a_module_list(level):
    """If the ModuleList were named, each of its modules would be kept, with FP16 between them."""
    factors = {"0_layers_0": 2.0**12, "0_layers_1": 2.0**12, "0_layers_2": 2.0**-24}
    make = lambda: nn.Sequential(Listed(), nn.Linear(4, 4, bias=False))  # noqa: E731
    seen, _ = look_deep(level, "cpu", factors, model=make())
    assert (seen.not_finite.module, seen.keep_fp32()) == ("0.layers.1", ["0"])
    seen, finite = look_deep(level, "cpu", factors, model=make(), keep_fp32=["0"])
    assert seen.not_finite is None and finite


@pytest.mark.parametrize("device", DEVICES)
def test_an_overflow_of_the_model_output_has_no_keep_list(device):
    """The model's own output is too large for FP16."""
    factors = {"block_0": 2.0**12, "block_1": 2.0**12}
    seen, _ = look_deep("O2", device, {**factors, "head": 2.0**4})
    assert seen.not_finite.module == "block.1"
    assert seen.keep_fp32() == ["block"]
    seen, _ = look_deep("O2", device, {**factors, "head": 2.0**4}, keep_fp32=["block"])
    assert seen.not_finite is not None and seen.keep_fp32() == []
    assert "try dtype=torch.bfloat16" in str(seen)
    seen, _ = look_deep("O2", device, {"head": 2.0**14, "first": 2.0**4})
    assert seen.errors["head"] == math.inf and seen.keep_fp32() == []  # FP32 inside of it would not help
    assert look_deep("O5", device, {**factors, "head": 2.0**4})[0].not_finite is None


class Apart(nn.Module):
    """Model with a layer `small` whose weight has a small gradient because its input is small."""

    def __init__(self):
        super().__init__()
        self.small, self.large = (nn.Linear(4, 4, bias=False) for _ in range(2))

    def forward(self, x):
        return self.small(x * 2.0**-13) + self.large(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_the_keep_list_of_inspect_restores_a_flushed_gradient(level, device):
    """2**-13 * 2**-12 is below FP16's smallest number, and `large` leaves no room for a scale of 2**16."""
    options = {"model": Apart(), "weight": 2.0**-12, "value": 1.0}
    seen, _ = look_deep(level, device, {}, **options)
    gradient = seen.gradients["small.weight"]
    if level == "O0":  # FP32 has flushed no number
        assert set(gradient.counts) == {-25} and gradient.flushed(1.0) == 1.0 and gradient.flushed(2.0) == 0.0
        assert seen.best_scale() == 2.0**27 and seen.keep_fp32() == []
        return
    assert gradient.zeros == gradient.total == 32
    assert seen.keep_fp32() == ["small"]
    assert "gradients that are 0 throughout: small.weight" in str(seen)
    options["model"] = Apart()
    seen, _ = look_deep(level, device, {}, **options, keep_fp32=["small"])
    assert set(seen.gradients["small.weight"].counts) == {-25}
    assert "small" not in seen.keep_fp32()


@pytest.mark.parametrize("device", DEVICES)
def test_the_keep_list_names_a_module_whose_gradient_the_best_scale_flushes(device):
    model = training.linear([[1.0, 1.0]], device)
    with inspect(model) as seen:
        (model(torch.tensor([[2.0**-20, 2.0**-21]], device=device)) * 2.0**-20).sum().backward()
    assert seen.best_scale() == 2.0**55
    seen.gradients["body.1.weight"] = copy.copy(seen.gradients["weight"])
    seen.gradients["head.weight"] = Histogram()
    seen.gradients["head.weight"].add(torch.full((3,), 2.0**14))
    assert seen.best_scale() == 2.0
    assert seen.keep_fp32() == ["body.1"]

"""compare_outputs: levels of one model side by side, by their outputs and in log-probabilities."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amp_patch import amp
from amp_patch.casts import install
from amp_patch.casts import state as casts_state
from amp_patch.training.training import trainings


def linear(rows: list[list[float]]) -> nn.Linear:
    layer = nn.Linear(len(rows[0]), len(rows), bias=False)
    layer.weight.data = torch.tensor(rows)
    return layer


FINE = 1 + 2.0**-9  # rounded to 1 in BF16, and a number of FP16


@pytest.mark.parametrize(("level", "distance"), [("O0", 0.0), ("O2", 0.0), ("O4", 2.0**-9), ("O5", 2.0**-9)])
def test_the_distance_of_outputs_is_relative_to_the_norm_of_the_first(level, distance):
    found = amp.compare_outputs(linear([[FINE]]), torch.ones(1, 1), [level])["O0", level]
    assert found.output == distance / FINE


def test_the_distance_of_a_pair_is_relative_to_its_first_level():
    found = amp.compare_outputs(linear([[FINE]]), torch.ones(1, 1), [], pairs=[("O5", "O2"), ("O2", "O5")])
    assert [each.output for each in found.distances] == [2.0**-9, 2.0**-9 / FINE]
    assert [(each.first, each.second) for each in found.distances] == [("O5 BF16", "O2 FP16"), ("O2 FP16", "O5 BF16")]


class Twice(nn.Module):
    """Calls one module twice, and has a random number dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(linear([[FINE, 0.0], [0.0, 1.0]]), nn.Dropout(0.5))
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(self.body(x)))


def test_all_levels_drop_the_same_numbers():
    torch.manual_seed(0)
    model = nn.Sequential(linear([[1.0] * 64] * 64), nn.Dropout(0.5))
    found = amp.compare_outputs(model, torch.ones(8, 64), ["O1", "O2", "O4", "O5"])
    assert [each.output for each in found.distances] == [0.0] * 4  # FP16 and BF16 hold 64 and 128


# ---------------------------------------------------------------------------------------------------------------------
# Log-probabilities.

ROWS = [[FINE, 0.0], [0.5, FINE], [-1.0, 0.25]]
INPUTS = torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.0, 4.0]])


def by_hand() -> tuple[Tensor, Tensor]:
    """Return the log-probabilities with FP32 weights and with BF16 weights."""
    weight = torch.tensor(ROWS)
    logits = (F.linear(INPUTS, each) for each in (weight, weight.bfloat16().float()))
    first, second = (each.double().log_softmax(-1) for each in logits)
    return first, second


def test_nats_are_weighted_by_the_probabilities_of_the_first():
    first, second = by_hand()
    found = amp.compare_outputs(linear(ROWS), INPUTS, ["O5"], band=0.003)["O0", "O5"]
    rows = (first.exp() * (second - first).abs()).sum(-1)
    assert found.nats == pytest.approx(rows.mean().item(), rel=1e-9)
    assert found.largest_nats == pytest.approx(rows.max().item(), rel=1e-9)
    outside = ((second - first).exp() - 1).abs() > 0.003
    assert 0 < outside.sum() < outside.numel()  # some ratios are outside the band, others inside
    assert found.outside == pytest.approx((first.exp() * outside).sum(-1).mean().item(), rel=1e-9)


def test_nats_count_only_targets_that_are_not_negative():
    first, second = by_hand()
    targets = torch.tensor([2, -100, 1])
    found = amp.compare_outputs(linear(ROWS), INPUTS, ["O5"], targets=targets, band=0.001)["O0", "O5"]
    apart = [abs((second - first)[row, target].item()) for row, target in ((0, 2), (2, 1))]
    assert found.nats == pytest.approx(sum(apart) / 2, rel=1e-9)
    assert found.largest_nats == pytest.approx(max(apart), rel=1e-9)
    assert found.outside == sum(math.expm1(each) > 0.001 for each in apart) / 2


def test_the_ratio_of_a_sequence_is_the_product_of_its_tokens_ratios():
    first, second = by_hand()
    targets = torch.tensor([[2, -100, 1], [-100, -100, -100]])
    inputs = torch.stack([INPUTS, INPUTS])
    found = amp.compare_outputs(linear(ROWS), inputs, ["O5"], targets=targets)["O0", "O5"]
    apart = sum((second - first)[row, target].item() for row, target in ((0, 2), (2, 1)))
    assert found.sequence == pytest.approx(abs(math.expm1(apart)), rel=1e-9) and found.sequence > 0
    assert "sequence - 1" in str(amp.compare_outputs(linear(ROWS), inputs, ["O5"], targets=targets))
    without = amp.compare_outputs(linear(ROWS), INPUTS, ["O5"], targets=targets[0])["O0", "O5"]
    assert without.sequence is None and without.nats == found.nats


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear(ROWS)

    def forward(self, x: Tensor) -> Any:
        masked = self.inner(x).masked_fill(torch.tensor([False, False, True]), -math.inf)
        return SimpleNamespace(loss=torch.zeros(()), logits=masked)


def test_nats_ignore_classes_that_a_mask_excludes():
    found = amp.compare_outputs(Masked(), INPUTS, ["O5"])["O0", "O5"]
    assert found.nats is not None and 0 < found.nats < 0.01


def test_an_output_that_is_no_logits_has_no_nats():
    found = amp.compare_outputs(nn.Flatten(0), INPUTS, ["O5"])["O0", "O5"]
    assert (found.nats, found.largest_nats, found.outside) == (None, None, None)
    named = amp.compare_outputs(nn.Flatten(0), INPUTS, ["O5"], logits=lambda output: output.view(3, 2))["O0", "O5"]
    assert named.nats == 0.0


# ---------------------------------------------------------------------------------------------------------------------
# Restored state, and accepted arguments.


@pytest.mark.parametrize("level", [None, "O1", "O2", "O5"])
def test_compare_outputs_restores_model_training_and_process(level):
    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if level is not None:
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = copy.deepcopy(model.state_dict())
    known, default, installed = list(trainings), casts_state.default(), install.installed()
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    amp.compare_outputs(model, torch.randn(4, 2, generator=torch.Generator().manual_seed(0)), ["O1", "O2", "O4", "O5"])
    assert torch.equal(torch.rand(()), expected)
    assert trainings == known and casts_state.default() is default
    assert install.installed() == installed or level in ("O2", "O5")  # beside a training O1's wrappers stay, inert
    assert model.state_dict().keys() == before.keys() and model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules() if level is None)


def test_o0_computes_with_the_masters_of_a_training():
    model = linear([[FINE]])
    amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), opt_level="O5", verbosity=0)
    found = amp.compare_outputs(model, torch.ones(1, 1), ["O5"])["O0", "O5"]
    assert found.output == 2.0**-9 / FINE


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear([[FINE]])

    def forward(self, x: Tensor, *, factor: float = 1.0) -> Tensor:
        return self.inner(x * factor)


@pytest.mark.parametrize("inputs", [torch.ones(1, 1), (torch.ones(1, 1),), {"x": torch.ones(1, 1), "factor": 2.0}])
def test_compare_outputs_takes_inputs_as_a_tensor_a_tuple_or_a_dict(inputs):
    assert amp.compare_outputs(Named(), inputs, ["O5"])["O0", "O5"].output == 2.0**-9 / FINE


def test_compare_outputs_passes_options_to_initialize():
    found = amp.compare_outputs(Named(), torch.ones(1, 1), ["O2"], dtype=torch.bfloat16)
    assert found.distances[0].second == "O2 BF16" and found["O0", "O2"].output == 2.0**-9 / FINE


def test_compare_outputs_applies_the_format_of_each_level():
    model, inputs = linear([[1.0, 0.3]]), torch.ones(1, 2)
    found = amp.compare_outputs(model, inputs, ["O6+fp8", "O6+nvfp4", "O6"], dtype="mxfp8", keep_high=())
    assert [each.second for each in found.distances] == ["O6+fp8 BF16", "O6+nvfp4 BF16", "O6 BF16"]
    for level, dtype in (("O6+fp8", "fp8"), ("O6+nvfp4", "nvfp4"), ("O6", "mxfp8")):
        alone = amp.compare_outputs(model, inputs, ["O6"], dtype=dtype, keep_high=())
        assert found["O0", level].output == alone["O0", "O6"].output
    # Scales are powers of two, and E4M3 rounds 0.3 to 0.3125.
    assert found["O0", "O6+fp8"].output == pytest.approx(0.0125 / 1.3, rel=1e-4)
    assert found["O0", "O6+nvfp4"].output > found["O0", "O6+fp8"].output


def test_the_table_of_distances_names_pairs():
    told = str(amp.compare_outputs(Masked(), INPUTS, ["O5"], band=0.2))
    assert "O0, O5 BF16" in told and "outside 1 ± 0.2" in told
    assert "O0, O5 BF16" in amp.compare_outputs(Masked(), INPUTS, ["O5"])._repr_html_()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": 3}, TypeError, "model is an int; wanted a torch.nn.Module"),
        ({"levels": "O2"}, TypeError, r"levels is the string 'O2'; wanted a list: levels=\['O2'\]$"),
        ({"pairs": ("O2", "O5")}, TypeError, r"pairs holds 'O2'; wanted pairs of levels: pairs=\[\('O2', 'O5'\)\]$"),
        ({"levels": ["O9"]}, ValueError, "level 'O9' is none of O0, O1"),
        ({"levels": ["O5+mxfp8"]}, ValueError, "mxfp8 is a format of the products of O6 or O7"),
        ({"targets": torch.tensor([0, 1, 3])}, ValueError, "below 3"),
        ({"logits": lambda output: None, "targets": torch.zeros(3)}, ValueError, "the output is no logits"),
    ],
)
def test_compare_outputs_refuses_bad_arguments_by_name(change, error, message):
    arguments: dict[str, Any] = {"model": linear(ROWS), "inputs": INPUTS, "levels": ["O5"], **change}
    with pytest.raises(error, match=f"compare_outputs: .*{message}"):
        amp.compare_outputs(**arguments)
    assert not trainings


def test_an_unknown_pair_raises_a_key_error_with_the_known_pairs():
    with pytest.raises(KeyError, match=r"pairs are \('O0', 'O5'\)"):
        amp.compare_outputs(linear(ROWS), INPUTS, ["O5"])["O0", "O4"]

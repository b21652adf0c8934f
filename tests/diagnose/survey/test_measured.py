"""The survey's measurement: errors that rounding does not explain are told, with their line, and no others."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import measured_cases
import measured_formula_cases
import pytest
import survey_cases
import survey_function_cases
import survey_sum_cases
import torch
from conftest import DEVICES
from measured_cases import CASES
from survey_cases import marked
from torch import nn
from torch.nn import functional as F

from amp_patch import amp
from amp_patch.diagnose.survey import attribution, measured

LEVELS = ("O1", "O2", "O4", "O5")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(16), nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attend(h, h, h, need_weights=False)[0]
        return x + self.mlp(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        return self.out(self.lstm(x)[0][:, -1])


def transformer():
    model = nn.Sequential(nn.Embedding(32, 16), Block(), Block(), nn.Linear(16, 32))
    tokens = torch.randint(0, 32, (4, 12))
    return model, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()), (tokens, tokens.roll(-1, 1))


def images():
    return torch.randn(16, 3, 10, 10), torch.randint(0, 4, (16,))


def convnet():
    features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(features, nn.Flatten(), nn.Linear(8, 4)), F.cross_entropy, images()


def recurrent():
    return Recurrent(), F.mse_loss, (torch.randn(8, 12, 8), torch.randn(8, 4))


def bias_before_a_norm():
    """The gradient of the bias is 0 but for roundings, which are large beside each other."""
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    return nn.Sequential(layer, nn.BatchNorm1d(4)), lambda out: out.pow(3).sum(), torch.randn(6, 4)


def sparse():
    model = nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(40, 3))
    return model, F.cross_entropy, (torch.randint(0, 50, (4, 5)), torch.randint(0, 3, (4,)))


class OneCode(nn.Module):
    """As VQ-VAE, with one code for all: the rows of the output are equal but for roundings."""

    def __init__(self):
        super().__init__()
        self.encode, self.code, self.decode = nn.Linear(8, 8), nn.Parameter(torch.randn(8)), nn.Linear(8, 8)

    def forward(self, x):
        h = self.encode(x)
        return self.decode(h + (self.code - h).detach()), (h - self.code.detach()).square().mean()


def one_code():
    return OneCode(), lambda out, y: F.mse_loss(out[0].float(), y) + out[1], (torch.randn(8, 8), torch.randn(8, 8))


HEALTHY = (transformer, convnet, recurrent, bias_before_a_norm, sparse, one_code)


@pytest.fixture(autouse=True)
def unhurried(monkeypatch):
    """Let no time pass for the measurement, so that a busy machine does not end it."""
    for module in (measured, attribution):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0))


def surveyed(case, device="cpu", *given, **options):
    torch.manual_seed(0)
    with torch.device(device):
        made = case(*given)
    return amp.survey(*made, **options)


def by_level(report):
    return {found.level: found for found in report.measured}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", HEALTHY, ids=lambda case: case.__name__)
def test_no_level_of_a_healthy_model_is_told_and_four_steps_a_level_are_enough(case, device):
    report = surveyed(case, device)
    assert (report.lines, tuple(by_level(report))) == ([], LEVELS)
    for found in report.measured:
        assert not found.told and not found.note
        assert found.errors.gradient < 0.05
        assert str(found) in str(report)
    assert sum(found.steps for found in report.measured) <= 4 * len(LEVELS)


PLANTED = (*survey_cases.CASES, *survey_function_cases.FUNCTION_CASES, *survey_sum_cases.SUM_CASES)
OFF = [*CASES, *(case for case in PLANTED if marked(case, "off"))]
LONG = {survey_sum_cases.total_of_a_loop: pytest.mark.slow}  # a minute: 2,500 calls of its layer in each forward


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.__name__, marks=LONG.get(case, ())) for case in OFF])
def test_an_error_that_rounding_does_not_explain_is_told_with_its_line(case, device):
    """Or with the first line of its function: whether one line alone mends it hangs on the CPU's roundings."""
    report = surveyed(case, device)
    lines = marked(case, "off")
    for level in sorted(set().union(*lines.values())):
        assert level in report.broken, (level, str(report))
        if (found := by_level(report).get(level)) is not None:
            named = found.cause.line
            assert level in lines.get(named.line, ()) or named.text().lstrip().startswith("def "), (level, found.cause)
            assert found.told and found.steps <= 40
            assert found.cause.edit


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("formula", measured_formula_cases.FORMULAS, ids=lambda formula: formula.__name__)
def test_a_formula_that_no_rule_knows_is_told_with_its_line_and_its_healthy_twin_is_clear(formula, device):
    report = surveyed(formula, device, False)
    lines = marked(formula, "off")
    wanted = set().union(*lines.values())
    assert [line for line in report.lines if line.op != "measured"] == []
    assert set(report.broken) & {*LEVELS} == wanted, str(report)
    for level in wanted:
        found = by_level(report)[level]
        assert level in lines[found.cause.line.line], (level, found.cause, found.cause.line.text())
        assert found.steps <= 40
    report = surveyed(formula, device, True)
    assert (report.lines, len(report.measured)) == ([], len(LEVELS)), str(report)
    assert sum(found.steps for found in report.measured) <= 4 * len(LEVELS)


class Counted(nn.Linear):
    """A model whose forwards are counted."""

    calls = 0

    def forward(self, x):
        Counted.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("factor", [1.0, 1e9, 1e-9])
def test_a_level_takes_four_steps_at_most_if_nothing_is_suspected(factor):
    """Whatever loss scale FP16 needs."""
    Counted.calls = 0
    report = amp.survey(Counted(4, 4), lambda out, y: factor * F.mse_loss(out, y), (torch.randn(8, 4),) * 2)
    assert [found.told for found in report.measured] == [[], [], [], []]
    assert Counted.calls - 1 == sum(found.steps for found in report.measured), "one is that of the rules"
    assert max(found.steps for found in report.measured) <= 4


LINES = "class ManyLines(Counted):\n def forward(self, x):\n  x = x + 3\n" + 50 * "  x = x + 0.0045 * x.sin()\n"


def test_a_level_takes_forty_steps_at_most_with_the_search():
    """Each of 50 lines has a part in the error, and a trial of a line is a step, as they are the model's own."""
    exec(LINES + "  return super().forward(x - 3)\n", names := {"Counted": Counted})
    Counted.calls = 0
    torch.manual_seed(0)
    report = amp.survey(names["ManyLines"](4, 4), F.mse_loss, (torch.randn(8, 4), torch.randn(8, 4)))
    found = by_level(report)["O5"]
    assert found.told and found.cause.line is not None
    assert Counted.calls - 1 == sum(each.steps for each in report.measured)
    assert 30 < found.steps <= 40


def test_the_figure_of_an_edit_is_what_the_edit_gives():
    """A buffer that stands still at O5 moves with keep_fp32="buffers", and the report says by how much."""
    case = measured_cases.load_of_experts
    cause = by_level(surveyed(case))["O5"].cause
    assert (cause.edit, cause.option_error) == ("keep_fp32='buffers'", 0.0)
    assert str(cause) == "keep_fp32='buffers' makes 100 % into 0 %"
    model, loss_fn, inputs = case()
    before = model.bias.clone()
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O5", keep_fp32="buffers", verbosity=0
    )
    with amp.scale_loss(loss_fn(model(inputs[0]), inputs[1]), optimizer) as scaled:
        scaled.backward()
    assert not torch.equal(model.bias, before)


def test_an_input_that_the_level_rounds_is_the_cause():
    found = by_level(surveyed(measured_cases.far_positions))["O5"]
    assert found.cause.alone == "input 1"
    assert found.cause.edit.startswith("pass input 1")


def test_a_loss_that_is_the_cause_is_told_as_the_loss():
    found = by_level(surveyed(measured_cases.loss_of_a_ratio))
    assert found["O4"].cause.by_loss
    assert not found["O5"].told  # the model's output is FP32 again there


def test_a_step_that_raises_is_told_with_its_line():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return torch.linalg.inv(self.layer(x) + 9 * torch.eye(4, device=x.device, dtype=x.dtype))

    def case():
        return Net(), lambda out: out.sum(), (torch.randn(2, 4, 4),)

    found = by_level(surveyed(case))["O5"]
    assert "linalg" in found.raised
    assert found.line.text().strip().startswith("return torch.linalg.inv")


def test_outputs_in_their_own_units_are_a_note():
    """Predictions around 2,000 that differ by 1: BF16's steps are 8 there, in any model that rounds its output."""

    def case():
        model = nn.Sequential(nn.Linear(4, 1))
        nn.init.constant_(model[0].bias, 2000.0)
        return model, lambda out, y: F.mse_loss(out.float(), y), (torch.randn(32, 4), 2000 + torch.randn(32, 1))

    report = surveyed(case)
    found = by_level(report)["O5"]
    assert not found.told
    assert "targets in their own units" in found.note and "scale the targets" in found.note
    assert found.note in str(report)


def test_outputs_that_rounding_moves_are_a_note_also_without_an_offset():
    """A code that repeats: no weight gets a gradient from it, as the loss takes the other output."""

    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            h = self.layer(x)
            return (400 * h.detach()).sin(), h

    found = by_level(surveyed(lambda: (Folded(), lambda out: out[1].square().sum(), torch.randn(32, 4))))["O4"]
    assert "moves the outputs by" in found.note and found.deserved.outputs > 0.2


def test_a_step_that_magnifies_rounding_is_a_note():
    class Slopes(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))

        def forward(self, x):
            return (self.net(x + 1e-3) - self.net(x)).float() / 1e-3

    def case():
        return Slopes(), F.mse_loss, (torch.randn(32, 2), torch.randn(32, 1))

    found = by_level(surveyed(case))["O5"]
    assert not found.told
    assert found.note


def test_the_model_the_random_states_and_other_trainings_are_as_before():
    other = nn.Linear(4, 4)
    other, optimizer = amp.initialize(other, torch.optim.SGD(other.parameters(), 0.1), opt_level="O1", verbosity=0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    model[0].weight.grad = torch.ones(8, 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    assert amp.survey(model, lambda out: out.square().sum(), torch.randn(6, 4, generator=torch.Generator())).measured
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.ones(8, 4))
    assert other(torch.randn(2, 4)).dtype is torch.float16
    del optimizer


def test_a_step_that_differs_by_itself_is_not_told():
    """A layer that draws from a generator of its own."""

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.draw = nn.Linear(4, 4), iter(range(100))

        def forward(self, x):
            return self.layer(x) * (1 + next(self.draw))

        def __deepcopy__(self, memo):
            made = Noisy()
            made.layer, made.draw = copy.deepcopy(self.layer, memo), self.draw
            return made

    found = by_level(amp.survey(Noisy(), lambda out: out.square().sum(), torch.randn(6, 4)))["O5"]
    assert not found.told
    assert "two steps in FP32 differ" in found.failed


def test_a_model_that_cannot_be_copied_is_not_measured():
    class Net(nn.Linear):
        def __deepcopy__(self, memo):
            raise TypeError("no copies of this")

    report = amp.survey(Net(4, 4), lambda out: out.sum(), torch.randn(2, 4))
    assert {found.failed for found in report.measured} == {"TypeError: no copies of this"}
    assert report.clear == ["O1", "O2", "O3", "O4", "O5", "O6", "O7"]
    assert "O5 was not measured: TypeError: no copies of this" in str(report)


def test_a_model_without_trained_parameters_is_not_measured():
    model = nn.Linear(4, 4).requires_grad_(False)
    report = amp.survey(model, lambda out: out.sum(), torch.randn(2, 4, requires_grad=True))
    assert {found.failed for found in report.measured} == {"it has no trained parameters"}


def test_an_interrupt_reaches_the_caller():
    class Net(nn.Linear):
        calls = 0

        def forward(self, x):
            Net.calls += 1
            if Net.calls > 3:
                raise KeyboardInterrupt
            return super().forward(x)

    with pytest.raises(KeyboardInterrupt):
        amp.survey(Net(4, 4), lambda out: out.sum(), torch.randn(2, 4))
    assert F.linear(torch.ones(1, 4), torch.ones(4, 4)).dtype is torch.float32  # no cast is left installed


def test_measurements_are_data_and_can_be_left_out():
    report = surveyed(measured_cases.crf)
    found = next(each for each in report.to_json()["measured"] if "O5" in each["levels"])
    assert found["told"] and found["gradient"] > 5 * found["deserved_gradient"]
    assert json.loads(json.dumps(report.to_json())) == report.to_json()
    assert surveyed(measured_cases.crf, measure=False).measured == []


@pytest.mark.parametrize(("arguments", "error", "words"), [
    ((3, F.mse_loss, ()), TypeError, "survey: model is an int; wanted a torch.nn.Module"),
    ((nn.Linear(1, 1), torch.mean, 3), TypeError, "survey: inputs is an int; wanted a tuple, a tensor or a dict"),
    ((nn.Linear(1, 1), lambda y: 3.0, torch.ones(1)), TypeError, "did not return a loss"),
    ((nn.Linear(1, 1).bfloat16(), torch.mean, torch.ones(1)), ValueError, r"amp.fp32_copy\(model\)"),
])  # fmt: skip
def test_what_is_no_training_in_fp32_is_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        amp.survey(*arguments)


def test_a_model_of_a_level_is_refused_with_the_way_out():
    model, _ = amp.initialize(nn.Linear(1, 1), [], opt_level="O2", verbosity=0)
    with pytest.raises(ValueError, match="call it before initialize"):
        amp.survey(model, torch.mean, torch.ones(1))

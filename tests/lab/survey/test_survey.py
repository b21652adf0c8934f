"""survey: each kind of line that a level would break is named where it is, and nothing else is."""

from __future__ import annotations

import copy
import inspect
import logging
import math

import pytest
import survey_cases
import survey_clean
import survey_function_cases
import torch
from conftest import DEVICES
from survey_cases import marked
from survey_clean import CLEAN
from torch import nn
from torch.nn import functional as F

from amp_patch import amp
from amp_patch.casts import install

CASES = (*survey_cases.CASES, *survey_function_cases.FUNCTION_CASES)
LEVELS = ["O1", "O2", "O3", "O4", "O5", "O6", "O7"]


def made(case, device="cpu"):
    torch.manual_seed(0)
    with torch.device(device):
        return case()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_line_is_named_at_the_levels_that_its_comment_has(case, device):
    report = amp.survey(*made(case, device))
    found: dict[bool, dict[int, set[str]]] = {True: {}, False: {}}
    for line in report.lines:
        assert line.file == inspect.getsourcefile(case)
        found[line.breaks].setdefault(line.line, set()).update(line.levels)
    assert found == {True: marked(case), False: marked(case, "notes")}, str(report)
    assert report.clear == [level for level in LEVELS if all(level not in each for each in marked(case).values())]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CLEAN, ids=lambda case: case.__name__)
def test_trainings_that_break_nowhere_have_no_line(case, device):
    report = amp.survey(*made(case, device))
    assert (report.lines, report.clear) == ([], LEVELS), str(report)


def trained(case, level):
    """Losses of the steps that are not skipped, without those before the loss scale has settled."""
    model, loss_fn, inputs = made(case)
    *given, targets = inputs
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, allow_banned=True)
    # `made` has read F.mse_loss before O1 replaced it, and in torch 2.11 its backward refuses FP16 beside FP32.
    loss_fn = install.in_force(loss_fn)
    takes_targets = case.__name__ not in ("years", "ctc", "loss_inside")
    losses = []
    while len(losses) < 3:
        loss = loss_fn(model(*given), targets) if takes_targets else loss_fn(model(*inputs))
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        if not optimizer._amp_stash.step_skipped:
            losses.append(loss.item())
    amp.restore()
    return losses


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_level_that_is_clear_trains_as_fp32(case, caplog):
    """The tolerance: in `years` FP16 has steps of 1, and the losses are squares of up to 16."""
    caplog.set_level(logging.ERROR)
    broken = set().union(*marked(case).values())
    exact = trained(case, "O0")
    for level in sorted({"O1", "O2", "O4", "O5"} - broken):
        assert trained(case, level) == pytest.approx(exact, rel=0.04), level


@pytest.mark.filterwarnings("ignore:.* has whole numbers alone")  # in `years` and `float_indices`
@pytest.mark.parametrize(("case", "level"), [
    (survey_cases.mask_of_a_billion, "O2"),
    (survey_cases.epsilon_in_a_logarithm, "O1"),
    (survey_function_cases.linear_algebra, "O5"),
    (survey_function_cases.ctc, "O2"),
    (survey_function_cases.numpy_of_outputs, "O4"),
    (survey_function_cases.mixed_types, "O2"),
    (survey_cases.years, "O5"),
    (survey_cases.float_indices, "O5"),
])  # fmt: skip
def test_a_level_that_is_named_does_not_train_as_fp32(case, level):
    exact = trained(case, "O0")
    try:
        losses = trained(case, level)
    except (RuntimeError, TypeError):
        return
    assert not all(math.isclose(one, other, rel_tol=0.05) for one, other in zip(losses, exact, strict=True))


def test_inputs_that_become_infinite_are_named_where_the_model_is_called():
    report = amp.survey(*made(survey_function_cases.large_inputs))
    (line,) = report.lines
    assert (line.file, line.op, line.levels) == (__file__, "input", ["O2", "O3"])
    assert "input 1 of the model" in line.what and "infinite in FP16" in line.what


def test_a_survey_leaves_everything_as_it_was():
    model, loss_fn, inputs = made(survey_clean.cnn)
    optimizer = torch.optim.Adam(model.parameters())
    loss_fn(model(inputs[0]), inputs[1]).backward()
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), [p.grad for p in model.parameters()], optimizer.state_dict()))
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    amp.survey(model, loss_fn, inputs, optimizer)
    after = (model.state_dict(), [p.grad for p in model.parameters()], optimizer.state_dict())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert torch.equal(torch.rand(3), expected)
    assert type(torch.autograd.Function.__dict__.get("apply")) in (classmethod, type(None))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_share_of_lost_updates_is_that_of_the_optimizers_step():
    """1 - 2**-10 is 1 in BF16, and no number of FP16 is nearer than 2**-11 below 1."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
    report = amp.survey(model, lambda output: output.sum(), torch.ones(1, 1), optimizer)
    assert report.lost == {"float16": 0.0, "bfloat16": 1.0}
    assert "0 % in FP16 and 100 % in BF16" in str(report)
    assert model.weight.item() == 1.0


@pytest.mark.parametrize(("eps", "broken"), [(1e-8, ["O3"]), (1e-4, [])])
def test_an_eps_that_is_0_in_fp16_is_named_for_the_level_that_steps_in_fp16(eps, broken):
    model, loss_fn, inputs = made(survey_clean.cnn)
    report = amp.survey(model, loss_fn, inputs, torch.optim.Adam(model.parameters(), eps=eps))
    assert report.broken == broken
    assert all(line.file == __file__ and "eps=1e-08 of Adam is 0 in FP16" in line.what for line in report.lines)


def test_a_tensor_that_another_process_has_sent_has_its_own_numbers():
    """torch makes it empty, of the storage's dtype, and sets its memory then."""
    model, sent = nn.Linear(8, 4), torch.randn(4, 4)

    def loss(output):
        rebuilt = torch.empty((0,), dtype=output.dtype).set_(sent.untyped_storage(), 0, (4, 4), (4, 1))
        return (output - rebuilt.to("cpu")).square().mean()

    assert amp.survey(model, loss, torch.randn(4, 8)).lines == []


def test_an_eps_that_is_a_list_is_no_error():
    model, loss_fn, inputs = made(survey_clean.cnn)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["eps"] = [1e-30, 1e-3]  # as Adafactor's
    assert amp.survey(model, loss_fn, inputs, optimizer).lines == []


def test_the_report_says_what_it_judges_and_which_levels_are_clear():
    report = amp.survey(*made(survey_cases.mask_of_a_billion))
    text = str(report)
    assert "survey_cases.py:" in text and "masked_fill  at O1, O2, O3" in text
    assert "clear: O4, O5, O6 and O7" in text
    assert "It trains nothing" in text
    assert report.broken == ["O1", "O2", "O3"]


def test_a_note_does_not_count_as_a_line_that_breaks():
    report = amp.survey(*made(survey_function_cases.loss_inside))
    assert (report.broken, report.clear, len(report.lines)) == ([], LEVELS, 1)
    assert "loss  at O5, O7, a note: the training does not break by it" in str(report)


def test_a_line_has_the_modules_whose_forward_it_is():
    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            kept = self.layer(x).relu()
            return kept / (kept.sum(-1, keepdim=True) + 1e-9)

    model = nn.Sequential(nn.Linear(4, 4), Unit(), nn.Sequential(Unit()), nn.Softmax(-1))
    nn.init.constant_(model[1].layer.bias, -9.0)
    nn.init.constant_(model[2][0].layer.bias, -9.0)
    report = amp.survey(model, F.mse_loss, (torch.randn(8, 4), torch.randn(8, 4)))
    assert [(line.op, line.modules) for line in report.lines] == [("div", ["1", "2.0"])]
    report = amp.survey(nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), F.mse_loss, (1e6 * torch.ones(8, 4),) * 2)
    assert ["1"] in [line.modules for line in report.lines if line.op == "softmax"]


def test_inputs_may_be_a_tensor_or_a_dict():
    model = nn.Linear(4, 4)
    assert amp.survey(model, torch.mean, torch.ones(2, 4)).lines == []
    assert amp.survey(model, torch.mean, {"input": torch.ones(2, 4)}).lines == []


@pytest.mark.parametrize(("arguments", "error", "words"), [
    ((3, F.mse_loss, ()), TypeError, "survey: model is a int; wanted a torch.nn.Module"),
    ((nn.Linear(1, 1), torch.mean, 3), TypeError, "survey: inputs is a int; wanted a tuple, a tensor or a dict"),
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

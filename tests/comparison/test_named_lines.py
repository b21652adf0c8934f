"""Lines that break a level, from the survey of the first step, beside the level's result in a report."""

from __future__ import annotations

import re

import pytest
import torch
from compared_runs import compare, seeds
from torch import nn
from torch.nn import functional as F

from amp_patch import amp
from amp_patch.comparison import named_lines, page, table
from amp_patch.comparison.comparison import Comparison

LINE = {
    "file": "net.py",
    "line": 12,
    "called": "",
    "op": "div",
    "levels": ["O2", "O3"],
    "what": "1e-08 is 0 in FP16",
    "edit": "take 1e-5",
}
SURVEY = {"lines": [LINE], "clear": ["O1", "O4", "O5"], "lost_updates": {}}
ERROR = "RuntimeError: mat1 and mat2 must have the same dtype"
BASE, GOOD, BAD = (2.0, 2.02, 1.98), (2.0005, 2.0204, 1.9806), (5.0, 6.0, 7.0)


def compared(*levels: list, survey: dict | None) -> Comparison:
    return compare(seeds("O0", *BASE), *levels, survey=survey)


def shown(comparison: Comparison) -> list[str]:
    return [" ".join(" ".join(table.lines(comparison)).split()), page.html(comparison)]


@pytest.mark.parametrize("runs", [
    seeds("O2", *BAD),
    seeds("O2", float("nan"), *BASE[1:]),
    seeds("O2", *BASE, error="RuntimeError: no kernel", loss=[]),
    seeds("O2", *GOOD, error="the script has no loss", refused=True, loss=[]),
    seeds("O2+split", *BAD),
    seeds("O5", *BAD, dtype="float16"),
])  # fmt: skip
def test_a_level_that_ended_badly_has_the_line_beside_it(runs):
    made = compared(runs, seeds("O4", *GOOD), survey=SURVEY)
    assert [level.name for level in made.unexplained] == [made.levels[1].name]
    named = "the survey names net.py:12 (div): 1e-08 is 0 in FP16"
    assert made.levels[1].verdict.text.endswith(named) and "survey" not in made.levels[2].verdict.text
    text, html = shown(made)
    assert named in text and "Edit: take 1e-5." in text
    assert named in html and re.search("<dt>What breaks</dt><dd>.*Edit: take 1e-5.</dd>", html)
    assert Comparison.from_dict(made.to_dict()).levels[1].verdict == made.levels[1].verdict


def test_an_edit_that_mends_two_operations_of_a_line_is_named_once():
    twice = {**SURVEY, "lines": [LINE, {**LINE, "op": "sqrt"}, {**LINE, "op": "log", "edit": "take logsumexp"}]}
    made = compared(seeds("O2", *BAD), seeds("O3", *BAD), survey=twice)
    assert made.levels[1].verdict.text.count("net.py:12") == 2
    text, _ = shown(made)
    assert text.count("net.py:12, O2 FP16, O3 FP16: ") == 2


@pytest.mark.parametrize("runs", [
    seeds("O2", *GOOD),
    seeds("O2", *BASE),
    seeds("O2", *BASE, error="killed", error_kind="killed", loss=[]),
])  # fmt: skip
def test_a_level_without_a_bad_end_has_no_line(runs):
    made = compared(runs, survey=SURVEY)
    assert not made.unexplained
    assert not any("survey" in each or "net.py" in each for each in shown(made))


def test_a_line_that_would_be_an_error_is_no_reason_for_a_level_that_had_none():
    """`compare` serves scripts whose types mix: the level trained, and ended worse by something else."""
    survey = {**SURVEY, "lines": [{**LINE, "raises": True, "what": "an error in FP16: expected float"}]}
    text, _ = shown(compared(seeds("O2", *BAD), survey=survey))
    assert "net.py" not in text and "the survey of the first step names no line that breaks O2" in text
    text, _ = shown(compared(seeds("O2", *BASE, error="RuntimeError: expected float", loss=[]), survey=survey))
    assert "the survey names net.py:12 (div): an error in FP16" in text


def test_a_line_that_compare_serves_is_no_reason():
    survey = {**SURVEY, "lines": [{**LINE, "raises": True, "served": True, "breaks": False}]}
    made = compared(seeds("O2", *BASE, error="RuntimeError: something else", loss=[]), survey=survey)
    assert not any("net.py" in each for each in shown(made))
    assert named_lines.modules({"lines": [{**survey["lines"][0], "modules": ["head"]}]}, "O2", None) == []


def test_a_script_that_fails_at_o0_too_is_not_surveyed():
    made = compare(seeds("O0", *BASE, error="ValueError: no", loss=[]), seeds("O2", *BASE, error="no", loss=[]))
    assert not made.unexplained


def test_a_survey_without_a_line_or_without_a_result_is_a_note():
    made = compared(seeds("O4", *BAD, dtype="bfloat16"), survey=SURVEY)
    assert "the survey of the first step names no line that breaks O4 BF16" in made.notes
    made = compared(seeds("O2", *BAD), survey={"failed": "KeyError: 1"})
    assert "the first step could not be surveyed for lines that break a level: KeyError: 1" in made.notes
    made = compared(seeds("O2", *BAD), survey=None)
    assert not any("survey" in each for each in shown(made))


class Unit(nn.Module):
    def __init__(self, least: float) -> None:
        super().__init__()
        self.layer, self.least = nn.Linear(4, 4), least

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.layer(x).relu()
        return kept / (kept.sum(-1, keepdim=True) + self.least)


@pytest.mark.parametrize("least", [1e-8, 1e-3])
def test_amp_compare_surveys_a_level_that_diverged(least):
    given, plain = torch.arange(-8.0, 0.0).reshape(2, 4) / 8, []

    def build():
        torch.manual_seed(0)
        model = Unit(least)
        nn.init.eye_(model.layer.weight)
        nn.init.zeros_(model.layer.bias)
        return model, torch.optim.SGD(model.parameters(), lr=0.1), F.mse_loss, [(given, given)] * 4

    made = amp.compare(build, ["O2"], seeds=1, verbosity=0)
    model, optimizer, loss_fn, batches = build()
    for x, y in batches:
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.append(loss.item())
    assert made.runs[0].loss == plain
    place = f"test_named_lines.py:{Unit.forward.__code__.co_firstlineno + 2} (div): 1e-08 is 0 in FP16"
    assert (place in made.levels[1].verdict.text) == (least == 1e-8)
    assert (made.survey is None) == (least == 1e-3)


@pytest.mark.parametrize("stops", [{"error": f"{ERROR}"}, {"caught": ERROR}], ids=("fails", "stops"))
@pytest.mark.parametrize("by_rule", [True, False])
def test_an_error_that_the_level_itself_shows_is_told_once(stops, by_rule):
    """The measurement meets the error that stopped the level; its line is named, and the error is not repeated."""
    raised = f"the step raises {ERROR}"
    line = {**LINE, "what": "an error in FP16" if by_rule else raised, "raises": True}
    measured = {"levels": ["O2", "O3"], "failed": "", "raised": ERROR, "words": raised}
    runs = seeds("O2", *BASE, **stops)
    for run in runs:
        run.loss = run.loss[:5]
    made = compared(runs, survey={**SURVEY, "lines": [line], "measured": [measured]})
    text = made.levels[1].verdict.text
    assert text.count(ERROR) == 1, text
    assert text.endswith("the survey names net.py:12 (div): an error in FP16" if by_rule else "net.py:12 raises it")


def test_an_error_that_no_run_shows_is_told_beside_its_level():
    measured = {"levels": ["O2"], "failed": "", "raised": ERROR, "words": f"the step raises {ERROR}"}
    text = compared(seeds("O2", *BAD), survey={"lines": [], "measured": [measured]}).levels[1].verdict.text
    assert text.endswith(f"one step, measured: the step raises {ERROR}")

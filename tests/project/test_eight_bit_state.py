"""The section on state in eight bits of docs/accuracy.md; shorter trainings by benchmarks/eight_bit_state.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
import scripts
from paths import BENCHMARKS, ROOT


@pytest.fixture(scope="module", name="scripts")
def scripts_fixture() -> dict[str, Any]:
    return {name: scripts.load(name) for name in ("eight_bit_state", "accuracy")}


def test_the_page_has_the_section_of_the_results(scripts):
    page = (ROOT / "docs" / "accuracy.md").read_text()
    assert "\n\n".join(scripts["accuracy"].state_in_eight_bits()) in page


def test_the_results_have_each_optimizer_on_both_tasks(scripts):
    script = scripts["eight_bit_state"]
    rows = json.loads((BENCHMARKS / "results" / "eight_bit_state.json").read_text())["rows"]
    assert [(row["task"], row["optimizer"]) for row in rows] == [
        (task, name) for task in script.TASKS for name in script.OPTIMIZERS
    ]
    for row in rows:
        assert len(row["FP32"]) == len(row["8bit"]) >= 3 and row["8bit bytes"] <= row["FP32 bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Adam", "Adadelta", "NAdam", "SGD"])
def test_state_in_eight_bits_loses_nothing(scripts, name):
    row = scripts["eight_bit_state"].measure("digits", name, 2, 100)
    assert row["8bit bytes"] < 0.3 * row["FP32 bytes"]
    for ours, theirs in zip(row["8bit"], row["FP32"], strict=True):
        assert abs(ours - theirs) < 0.15 * theirs

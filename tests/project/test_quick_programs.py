"""benchmarks/quick_programs.py: its table is that of its results, and its clock notes the time of each step."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from paths import BENCHMARKS, ROOT, benchmark_fixture

pytestmark = pytest.mark.program

quick = benchmark_fixture("quick_programs")


def test_the_page_has_the_table_of_the_results(quick, tmp_path):
    page = tmp_path / "unedited.md"
    page.write_text((ROOT / "docs" / "unedited.md").read_text())
    quick.write(json.loads(quick.RESULTS.read_text()), page)
    assert page.read_text() == (ROOT / "docs" / "unedited.md").read_text()


def test_ten_programs_have_an_answer_with_the_speed_of_both_clocks(quick):
    results = json.loads(quick.RESULTS.read_text())
    assert {label.partition(" (")[0] for label in results} == set(quick.QUICK) and len(results) >= 10
    for label, found in results.items():
        assert found["said"], label
        for level in quick.LEVELS:
            assert found["levels"][level]["speed"] and found["levels"][level]["clock"], label


def test_a_step_is_the_median_of_the_differences_without_the_first_tenth(quick, tmp_path):
    path = tmp_path / "O4.txt"
    path.write_text("".join(f"{time}\n" for time in (0, 90, 91, 92, 93, 95, 96, 97, 98, 99)))
    assert quick.step_time(path) == 1.0
    assert quick.step_time(tmp_path / "absent.txt") is None


def test_a_cell_has_the_range_the_clock_and_the_loss(quick):
    assert quick.cell({"speed": [0.9, 1.2], "clock": 1.1, "loss": 0.5}) == "0.9x to 1.2x (1.1x), loss +0.5 %"
    assert quick.cell({"speed": None, "clock": None, "loss": None}) == quick.cell(None) == "no result"


def test_the_clock_notes_a_time_after_each_optimizer_step(tmp_path):
    code = """
import torch
optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
for _ in range(3):
    optimizer.step()
"""
    told = {"PYTHONPATH": str(BENCHMARKS / "clock"), "STEP_CLOCK": str(tmp_path), "AMP_PATCH_OPT_LEVEL": "O4"}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **told}, check=True)
    times = [float(line) for line in (tmp_path / "O4.txt").read_text().split()]
    assert len(times) == 3 and times == sorted(times)

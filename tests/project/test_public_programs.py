"""benchmarks/public_programs.py and quick_programs.py: programs and commits, generated data, the clock and the page."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from paths import BENCHMARKS, ROOT, benchmark_fixture

harness = benchmark_fixture("public_programs")
quick = benchmark_fixture("quick_programs")


def test_each_program_has_a_unique_name_and_a_commit_or_a_script(harness):
    labels = [program.label for program in harness.PROGRAMS]
    assert len(set(labels)) == len(labels)
    for program in harness.PROGRAMS:
        if program.repository:
            assert len(harness.COMMITS[program.repository]) == 40
        else:
            assert (BENCHMARKS / "library_scripts" / program.script).exists()
    assert {program.repository for program in harness.PROGRAMS} - {""} == set(harness.COMMITS)


def test_generated_data_are_always_the_same_and_small(harness, tmp_path):
    for program in harness.PROGRAMS:
        if {"torchvision", "pillow", "trl", "transformers"} & {*program.packages}:
            continue  # pictures want Pillow, and models want transformers
        found = []
        for name in "ab":
            folder = tmp_path / name / program.label / "in" / "it"
            folder.mkdir(parents=True)
            program.prepare(folder)
            files = sorted(path for path in (tmp_path / name / program.label).rglob("*") if path.is_file())
            found.append(
                {path.relative_to(tmp_path / name): path.read_bytes() for path in files if path.suffix != ".tgz"}
            )
        assert found[0] == found[1]
        assert sum(map(len, found[0].values())) < 1_000_000


@pytest.mark.program
@pytest.mark.parametrize("which", ["harness", "quick"])
def test_the_page_has_the_table_of_the_results(which, request, tmp_path):
    script, page, written = request.getfixturevalue(which), ROOT / "docs" / "unedited.md", tmp_path / "unedited.md"
    written.write_text(page.read_text())
    script.write(json.loads(script.RESULTS.read_text()), written)
    assert written.read_text() == page.read_text()


@pytest.mark.program
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

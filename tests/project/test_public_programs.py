"""benchmarks/public_programs.py: its results for stand-in programs; the real programs are not run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from paths import BENCHMARKS, ROOT, benchmark_fixture

harness = benchmark_fixture("public_programs")


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


@pytest.mark.parametrize(
    ("events", "said", "cell"),
    [
        ([{"event": "step"}], "", "trains"),
        ([{"event": "step"}, {"event": "end", "error": None}], "", "trains"),
        ([], "no step was recorded", "fails"),
        ([{"event": "step", "skipped": True}] * 2, "each step was skipped, because its gradients overflowed", "fails"),
        ([{"event": "step"}, {"event": "end", "error": "RuntimeError:\n  no"}], "RuntimeError: no", "fails"),
        ([{"event": "end", "error": "this script cannot be taken unedited: why"}], ..., "refused"),
    ],
)
def test_outcome_names_a_level_s_end(harness, events, said, cell, tmp_path):
    record = tmp_path / "record.jsonl"
    record.write_text("".join(json.dumps(event) + "\n" for event in events))
    outcome = harness.outcome(record)
    assert said in (outcome, ...)
    assert harness.cell(outcome) == cell


def test_a_version_stays_until_a_level_does_otherwise(harness, monkeypatch):
    good = dict.fromkeys(harness.LEVELS, "")
    monkeypatch.setattr(harness.amp_patch, "__version__", "2.0")
    assert harness.with_version(good, None)["since"] == "2.0"
    assert harness.with_version(good, {**good, "since": "1.0"})["since"] == "1.0"
    assert harness.with_version(good, {**good, "O1": "an error", "since": "1.0"})["since"] == "2.0"


def test_the_page_has_the_table_of_the_results(harness, tmp_path):
    page = tmp_path / "unedited.md"
    page.write_text((ROOT / "docs" / "unedited.md").read_text())
    harness.write(json.loads(harness.RESULTS.read_text()), page)
    assert page.read_text() == (ROOT / "docs" / "unedited.md").read_text()


@pytest.mark.slow
def test_a_program_that_cannot_be_fetched_is_skipped_by_name(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "public_programs.py"), "--only", "regression", "--out", str(tmp_path)]
    page = tmp_path / "page.md"
    page.write_text("| program | kind |\n\n")
    options = ["--page", str(page), "--results", str(tmp_path / "results.json")]
    nowhere = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "https_proxy": "http://127.0.0.1:9",
        "HOME": str(tmp_path),
    }
    done = subprocess.run([*command, *options], env=nowhere, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("examples/regression (SGD by hand): skipped: git: ")

"""benchmarks/models.py: docs/models.md is the page of its results, and says why a model does not survive a level."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import BENCHMARKS, ROOT, benchmark_fixture

pytestmark = pytest.mark.program

models = benchmark_fixture("models")
RESULTS = BENCHMARKS / "results" / "models.json"
LEVELS = ("O1", "O2", "O4", "O5")


@pytest.fixture(scope="module")
def results() -> dict:
    return json.loads(RESULTS.read_text())


def page_of(results: Path, folder: Path) -> str:
    page = folder / "models.md"
    command = [sys.executable, str(BENCHMARKS / "models.py"), "--table", "--results", str(results), "--page", str(page)]
    subprocess.run(command, cwd=ROOT, check=True)
    return page.read_text()


def test_the_page_has_the_results(tmp_path: Path) -> None:
    assert page_of(RESULTS, tmp_path) == (ROOT / "docs" / "models.md").read_text()


KNOWN = {  # what is published of a model -> the level, the outcome that shows it, and words of the survey's line there
    "T5ForConditionalGeneration, as large as trained": ("O1", "diverges", "linear has .* infinite in FP16"),
    "LongT5ForConditionalGeneration": ("O2", "diverges", "masked throughout: in FP16 it is -inf"),  # -1e10
    "DebertaForMaskedLM": ("O1", "fails", "a number does not fit FP16"),  # finfo of an FP32 tensor
    "FNetForMaskedLM": ("O2", "fails", "torch has no fft_fftn"),
    "SD3Transformer2DModel": ("O5", "as good", "angles are off"),  # random weights do not learn the time
}


@pytest.mark.parametrize("label", KNOWN)
def test_known_answers_come_out(results: dict, label: str) -> None:
    level, outcome, line = KNOWN[label]
    model = results["models"][label]
    assert model["levels"][level]["outcome"] == outcome
    assert any(re.search(line, each["what"]) and level in each["levels"] for each in model["survey"] if each["breaks"])


def test_the_page_is_of_many_models(results: dict) -> None:
    assert len(results["models"]) >= 150 and len({model["package"] for model in results["models"].values()}) == 6


def test_each_model_has_every_level_and_a_reason_where_it_does_not_survive(results: dict) -> None:
    for label, model in results["models"].items():
        assert set(model["levels"]) == set(LEVELS), label
        for level in model["levels"].values():
            assert level["outcome"] == "as good" or level["reason"], label
            if level["outcome"] in ("as good", "worse"):
                assert level["gap"], label

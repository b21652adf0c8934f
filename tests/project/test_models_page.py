"""benchmarks/models.py: docs/models.md is the page of its results, and says why a model does not survive a level."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from paths import BENCHMARKS, ROOT

RESULTS = BENCHMARKS / "results" / "models.json"
LEVELS = ("O1", "O2", "O4", "O5")


@pytest.fixture(scope="module")
def results() -> dict:
    return json.loads(RESULTS.read_text())


def test_the_page_has_the_results(tmp_path: Path) -> None:
    page = tmp_path / "models.md"
    command = [sys.executable, str(BENCHMARKS / "models.py"), "--table", "--page", str(page)]
    subprocess.run(command, cwd=ROOT, check=True)
    assert page.read_text() == (ROOT / "docs" / "models.md").read_text()


def test_the_page_is_of_many_models(results: dict) -> None:
    assert len(results["models"]) >= 150 and len({model["package"] for model in results["models"].values()}) == 6


def test_each_model_has_every_level_and_a_reason_where_it_does_not_survive(results: dict) -> None:
    for label, model in results["models"].items():
        assert set(model["levels"]) == set(LEVELS), label
        for level in model["levels"].values():
            assert level["outcome"] == "as good" or level["reason"], label
            if level["outcome"] in ("as good", "worse"):
                assert level["gap"], label


def test_each_model_that_was_left_out_has_an_error(results: dict) -> None:
    assert not set(results["models"]) & set(results["left_out"])
    assert all(results["left_out"].values())


def test_models_of_every_trained_package_have_a_version(results: dict) -> None:
    assert results["torch"]
    assert {model["package"] for model in results["models"].values()} <= set(results["packages"])

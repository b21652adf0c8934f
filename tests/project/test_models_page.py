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


def rows_of_kinds(page: str) -> list[list[str]]:
    """Return the cells of each row of the table of kinds, without its head."""
    part = page.partition("## Why a level is not as good")[2].partition("## ")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.splitlines() if line.startswith("| ")][1:]


def test_the_page_has_the_results(tmp_path: Path) -> None:
    assert page_of(RESULTS, tmp_path) == (ROOT / "docs" / "models.md").read_text()


def test_each_finding_has_a_kind(results: dict, tmp_path: Path) -> None:
    rows = rows_of_kinds((ROOT / "docs" / "models.md").read_text())
    assert "another reason" not in [name for name, *_ in rows]
    written = " ".join(which for _, _, which, _ in rows)
    lost = {
        label: [level for level, end in model["levels"].items() if end["outcome"] not in ("as good", "undecided")]
        for label, model in results["models"].items()
    }
    for label, levels in lost.items():
        assert levels == [] or label in written, label


LINES = {  # what happened at O2 -> what the survey names
    "a mask": "a row of softmax is masked throughout: in FP16 it is -inf",
    "an activation": "linear has 2e+05, which is infinite in FP16",
    "an epsilon": "layer_norm of equal numbers with eps=1e-12: its gradients are infinite in FP16",
    "a line": "angles are off by up to 1.7 radians",
}
REASONS = {  # what happened at O2 -> the outcome, the gap, compare's words, the kind, its cell
    "an overflow": ("fails", None, "failed: value cannot be converted without overflow", "fills with a number", "(O2)"),
    "a type": ("fails", None, "failed: mat1 and mat2 must have the same dtype", "mixes FP32 tensors", "(O2)"),
    "no kernel": ("fails", None, "failed: Unsupported dtype Half", "calls a function that torch lacks", "(O2)"),
    "a mask": ("diverges", None, "diverged with seeds 0, 1 and 2 at step 0", "a mask of -1e9", "(O2)"),
    "an activation": ("diverges", None, "diverged with seeds 0, 1 and 2 at step 0", "activations that FP16", "(O2)"),
    "an epsilon": ("worse", 640.0, "collapsed with seeds 0, 1 and 2: final loss 1.6", "an epsilon of 1e-12", "(O2)"),
    "a collapse": ("worse", 9e9, "collapsed with seed 0: final loss 1.4", "one seed of three collapsed", "(O2)"),
    "a step": ("worse", 7.053, "final loss 0.2512, 7.1 % above O0's", "a step less", "(O2 +7.1 %)"),
    "a gap": ("worse", 7.053, "final loss 0.2512, 7.1 % above O0's", "worse on random batches", "(O2 +7.1 %)"),
    "chance": ("undecided", 3.0, "which may be chance", "undecided on random batches", "(O2)"),
    "a line": ("as good", 0.1, "", "as good, although the survey names a line", "(O2)"),
    "else": ("fails", None, "failed: KeyError: 'x'", "another reason", "(O2)"),
}


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


def model_of(outcome: str, gap: float | None, reason: str, named: str | None, skipped: int = 0) -> dict:
    good = {"outcome": "as good", "gap": [0.1, 0.0, 0.2], "reason": ""}
    end = {
        "outcome": outcome,
        "gap": gap if gap is None else [gap, gap - 1, gap + 1],
        "reason": reason,
        "skipped": skipped,
    }
    line = {"place": "a.py:1", "op": "add", "what": named, "levels": ["O2", "O3"], "breaks": True}
    survey = [] if named is None else [line]
    levels = {**dict.fromkeys(LEVELS, good), "O2": end}
    return {"package": "timm", "parameters": 9, "loss": [2.0, 1.0], "survey": survey, "levels": levels}


def test_the_page_groups_reasons_by_kind(tmp_path: Path) -> None:
    models = {name: model_of(*reason[:3], LINES.get(name), name == "a step") for name, reason in REASONS.items()}
    models["fine"] = model_of("as good", 0.1, "", None)
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"models": models, "left_out": {}, "torch": "2.13.0", "packages": {"timm": "1.0"}}))
    rows = rows_of_kinds(page_of(path, tmp_path))
    assert len(rows) == len(REASONS)
    for name, (*_, kind, cell) in REASONS.items():
        (row,) = [row for row in rows if row[0].startswith(kind)]
        assert row[1:3] == ["1", f"{name} {cell}"]


def test_a_kind_of_many_models_has_their_number_at_each_level(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    models = {f"m{i}": model_of("undecided", 3.0, "which may be chance", None) for i in range(21)}
    path.write_text(json.dumps({"models": models, "left_out": {}, "torch": "2.13.0", "packages": {"timm": "1.0"}}))
    assert rows_of_kinds(page_of(path, tmp_path))[0][1:3] == ["21", "O1: 0, O2: 21, O4: 0, O5: 0"]


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


@pytest.mark.parametrize(
    ("now", "before", "wrong"),
    [
        (("worse", [5, 2, 8]), ("worse", [50, 40, 60]), False),
        (("worse", [5, 2, 8]), ("as good", [1, -3, 3]), False),  # three seeds cannot tell
        (("worse", [5, 2, 8]), ("as good", [0, -1, 1]), True),
        (("as good", [0, -1, 1]), ("undecided", [5, 2, 8]), True),
        (("fails", None), ("as good", [0, -1, 1]), True),
        (("fails", None), ("fails", None), False),
    ],
)
def test_two_results_contradict_each_other_beyond_chance(now, before, wrong, models) -> None:
    results = [{"outcome": outcome, "gap": gap} for outcome, gap in (now, before)]
    assert models.contradicts(*results) is wrong

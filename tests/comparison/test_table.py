"""The comparison in a terminal: all of its text, within 80 columns."""

from __future__ import annotations

import math
import re

import pytest
from compared_runs import made_up_run, seeds

from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.table import lines
from amp_patch.diagnose.recording.run import PARTS, Run


def words(shown: list[str]) -> str:
    """Join wrapped lines, without line breaks and padding."""
    return " ".join(" ".join(shown).split())


def row(shown: list[str], title: str, level: str) -> list[str]:
    """The cells of a level in the table under `title`."""
    start = next(i for i, line in enumerate(shown) if line.startswith(title))
    return next(line for line in shown[start:] if line.split()[:1] == [level]).split()


@pytest.fixture
def comparison() -> Comparison:
    base = seeds("O0", 1.0, 1.25, 1.5, ms=20)
    worse = seeds("O3", 2.0, 2.25, 2.5625, ms=5)
    o2 = seeds("O2", 1.0, 1.25, 1.5, ms=10, masters=2**20, weights=2**19, peak_memory=2**19)
    failed = Run("O5", 0, error="RuntimeError: [/red] no [bold] memory")
    return Comparison("train.py", [*base, *o2, *worse, failed], asked_steps=50)


def test_the_table_shows_the_figures_of_each_level(comparison):
    shown = lines(comparison)
    assert words(shown).startswith(f"{comparison.summary} train.py, 40 steps level final loss vs O0 speed memory O0 ")
    # level, type, result, against O0, speed, memory
    assert row(shown, "train.py", "O0") == ["O0", "1.250", "1.00x", "1.00", "the", "baseline"]
    assert row(shown, "train.py", "O2") == ["O2", "FP16", "1.250", "0", "%", "2.00x", "0.50", "use", "this"]
    assert row(shown, "train.py", "O3") == [
        "O3",
        "FP16",
        "2.271",
        "+82",
        "%",
        "4.00x",
        "1.00",
        "do",
        "not",
        "use:",
        "worse",
    ]
    assert row(shown, "train.py", "O5") == ["O5", "failed"]


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("cuda", "some GPU; threads: 4; tensor cores: FP16 and BF16."),
        ("cpu", "some CPU; threads: 4; BF16: a; FP16: b."),
    ],
)
def test_the_table_describes_the_processor_that_trained(device, said):
    """On a machine with a GPU, both when all runs trained there and when none did."""
    machine = {"cpu": "some CPU", "gpu": "some GPU", "threads": "4", "bfloat16": "a", "float16": "b"}
    machine["tensor_cores"] = "FP16 and BF16"
    runs = [*seeds("O0", 1.0, device=device), *seeds("O2", 1.0, device=device)]
    assert [line for line in lines(Comparison("train.py", runs, machine=machine)) if "threads" in line] == [said]


def test_the_table_shows_the_distance_to_the_baseline():
    figures = {"O1": 1.0, "O2": 1.3125, "O3": 2.5, "O4": 100.0, "O5": -100.0}
    runs = [*seeds("O0", 1.0), *(run for level, final in figures.items() for run in seeds(level, final))]
    shown = lines(Comparison("train.py", runs))
    assert [row(shown, "train.py", level)[3] for level in figures] == ["0", "+31", "+150", "+9900", "-10100"]
    broken = [*seeds("O0", 1.0, 1.0), *seeds("O3", 1.0, math.nan)]
    assert row(lines(Comparison("train.py", broken)), "train.py", "O3")[2:5] == ["diverged", "1.00x", "1.00"]
    assert row(lines(Comparison("train.py", broken, "accuracy")), "train.py", "O3")[2:] == ["missing"]


def test_verdicts_and_notes_follow_the_recommendation(comparison):
    shown = lines(comparison)
    said = words(shown)
    assert "O5 failed with seed 0: RuntimeError: [/red] no [bold] memory" in said, "brackets are no markup"
    note = "Note: all runs: trained 40 of the 50 steps asked for."
    assert note in said
    assert comparison.summary.startswith("Use O2 FP16: 2.0x faster")
    assert not any(word in said for word in ("95 %", "gap to", "spread")), "four figures of a level are enough"


def long_comparison() -> Comparison:
    """Six levels with the longest numbers there are."""
    runs = []
    for i, level in enumerate(("O0", "O1", "O2", "O3", "O4", "O5")):
        dtype = None if level == "O0" else "bfloat16"
        sign = -1 if i % 2 else 1
        for seed in range(11):
            final = sign * 1.23456e-17 * (1 + seed / 7) * 10.0**i
            run = made_up_run(level, seed, final=final, ms=123456.789 / 2.5**i, dtype=dtype)
            run.loss = [final] * 40
            run.logged = {"held_out_perplexity_per_character": [(1, final)]}
            run.scale = [3.0 * 2**-24 if i % 2 else 2.0**24] * 40
            run.skipped = [True] * 40
            run.peak_memory = 99_999 * 2**20 // (1 + i) ** 5
            run.weights = run.masters = run.gradients = run.state = 123456 * 2**20
            run.samples = [123456789] * 40
            run.notes = ["x" * 100]
            runs.append(run)
    runs.append(Run("O5", 11, dtype="bfloat16", error="RuntimeError: " + "y" * 200))
    return Comparison("/a/long/path/" + "z" * 90 + ".py", runs, asked_steps=123456789)


@pytest.mark.parametrize("metric", ["loss", "held_out_perplexity_per_character"])
def test_the_table_shows_all_text_at_80_columns(metric):
    base = long_comparison()
    comparison = Comparison(base.title, base.runs, metric, asked_steps=base.asked_steps)
    shown = lines(comparison)
    assert max(map(len, shown)) <= 80
    text = "\n".join(shown)
    assert "…" not in text and "..." not in text
    assert text.count("x") >= 100 and text.count("y") >= 200 and text.count("z") >= 90
    # The rows of the table are one line each, whatever the numbers are.
    start = next(i for i, line in enumerate(shown) if line.startswith("O0 "))
    assert [line.split()[0] for line in shown[start : start + 6]] == ["O0", "O1", "O2", "O3", "O4", "O5"]


def test_the_table_has_colours_only_on_request(comparison):
    plain = lines(comparison)
    assert "\x1b" not in "\n".join(plain)
    coloured = "\n".join(lines(comparison, colours=True))
    assert "\x1b[31mdo not use: worse\x1b[0m" in coloured and "\x1b[32muse this\x1b[0m" in coloured
    assert [re.sub(r"\x1b\[\d+m", "", line) for line in coloured.split("\n")] == plain


def test_runs_that_all_failed_alike_are_one_line_with_the_path_of_the_log():
    log = f"{'a long folder/' * 9}runs/O0-seed0.log"
    runs = [Run(level, error="ValueError: no", error_where="train.py, line 3", log=log) for level in ("O0", "O4")]
    said = f"Nothing to compare: all 2 runs failed: ValueError: no (train.py, line 3; see {log})."
    assert lines(Comparison("train.py", runs)) == [said]
    runs[1].error = "ValueError: yes"
    (line,) = lines(Comparison("train.py", runs))
    assert line.startswith("Nothing to compare: no run went well. O0: failed with seed 0: ValueError: no (train.py")


@pytest.mark.parametrize(
    "runs",
    [
        [],
        [Run("O0", 0, error="no such file"), Run("O2", 0, error="no such file")],
        [Run("O0", 0, loss=[math.nan], seconds=[math.nan], parts={part: [math.nan] for part in PARTS})],
        [Run("O0", 0, logged={"accuracy": [(0, 1.0)]})],
        [made_up_run("O0", steps=1), made_up_run("O2", steps=1)],
    ],
)
def test_a_table_of_few_runs_begins_with_the_summary(runs):
    comparison = Comparison("train.py", runs)
    assert words(lines(comparison)).startswith(words([comparison.summary]))

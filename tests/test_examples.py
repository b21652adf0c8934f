"""The examples run as a user runs them, warnings as errors, and what they print is what they promise."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="the examples' digits come with scikit-learn")

EXAMPLES = Path(__file__).parents[1] / "examples"
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
# Run by name below, each with a test of what it shows. A new example without one fails test_every_example_is_tested.
SCRIPTS = ("minimal", "accumulate", "clip", "resume", "gan", "opt_levels", "graph")
MODULES = ("data", "tasks", "curves")


def run(example: str, *arguments: str, cwd: Path, options: tuple[str, ...] = ("-W", "error")) -> str:
    """What `python examples/<example>.py` prints. From another directory: it is the installed package that runs."""
    script = [sys.executable, *options, str(EXAMPLES / f"{example}.py"), *arguments]
    # One thread: the models are tiny, and the tests may share their cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    done = subprocess.run(script, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr == "", "an example leaves nothing on stderr"
    return done.stdout


def number(pattern: str, printed: str) -> float:
    found = re.search(pattern, printed)
    assert found, f"{pattern!r} is not in:\n{printed}"
    return float(found[1])


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SCRIPTS, *MODULES}


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_minimal_learns(level, tmp_path):
    printed = run("minimal", "--opt-level", level, "--epochs", "4", cwd=tmp_path)
    assert number(rf"{level}: held-out accuracy ([\d.]+)%", printed) > 92


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_accumulating_changes_nothing_but_the_memory(level, tmp_path):
    losses = [
        number(
            r"held-out loss ([\d.]+)",
            run("accumulate", "--opt-level", level, "--micro-batches", micro_batches, "--epochs", "3", cwd=tmp_path),
        )
        for micro_batches in ("1", "4")
    ]
    # Half gradients are rounded at another place; three epochs move the fourth digit at most.
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_clipping_sees_unscaled_gradients(level, tmp_path):
    printed = run("clip", "--opt-level", level, "--epochs", "3", cwd=tmp_path)
    assert number(r"(\d+) of \d+ steps clipped", printed) > 0
    # Under a scale of 2**16 an unscaled norm of 1 would read 65536.
    assert number(r"largest norm ([\d.]+)", printed) < 100
    assert number(r"held-out accuracy ([\d.]+)%", printed) > 60


@pytest.mark.parametrize("level", LEVELS)
def test_resume_is_bit_exact(level, tmp_path):
    printed = run("resume", "--opt-level", level, "--epochs", "2", cwd=tmp_path)
    assert "4 tensors, the same bits with and without the stop" in printed


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gan_draws_what_is_closer_to_digits_than_noise(level, tmp_path):
    printed = run("gan", "--opt-level", level, "--steps", "600", cwd=tmp_path)
    drawn, held_out, noise = (
        number(pattern, printed) for pattern in (r"drawn ([\d.]+)", r"held-out digits ([\d.]+)", r"noise ([\d.]+)")
    )
    assert held_out < drawn < (held_out + noise) / 2
    assert len(json.loads(re.search(r"loss scales (\[.*\])", printed)[1])) == 3


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_graph_trains_as_the_loop_beside_it(backend, tmp_path):
    options = ("-W", "error", "-W", "ignore::DeprecationWarning")  # Inductor's imports bring one
    printed = run("graph", "--backend", backend, "--epochs", "4", cwd=tmp_path, options=options)
    both = re.findall(r"graph ([\d.]+)  eager ([\d.]+)", printed)
    assert len(both) == 4
    for graph, eager in both:
        assert float(graph) == pytest.approx(float(eager), abs=0 if backend == "eager" else 5e-3)
    assert number(r"held-out accuracy ([\d.]+)%", printed) > 92


def test_opt_levels_ends_with_a_row_for_each_level_and_a_picture(tmp_path):
    out = tmp_path / "deep" / "curves.png"
    chosen = ("O0", "O1", "O2", "O5")
    printed = run("opt_levels", "--steps", "4", "--levels", *chosen, "--out", str(out), cwd=tmp_path)
    for title in ("digits, 4 steps", "gpt, 4 steps"):
        assert title in printed
    assert "…" not in printed, "the tables fit a terminal of 80 columns"
    for level in chosen:
        assert len(re.findall(rf"^ *{level} +\d", printed, re.MULTILINE)) == 2
    assert "Loss curves:" in printed
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def demo(monkeypatch):
    """The module opt_levels; its `main` returns what it prints."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import opt_levels

    yield opt_levels
    for name in ("opt_levels", *MODULES):
        sys.modules.pop(name, None)


def test_opt_levels_counts_the_memory_of_each_level(demo, tmp_path):
    results = demo.main(["--task", "gpt", "--steps", "2", "--out", str(tmp_path / "curves.png")])
    by_level = {result.level: result for result in results}
    full = by_level["O0"].weights
    # Adam holds two tensors like the weights, and four bytes a parameter for its step count, which we leave out.
    expected = {  # (weights, masters, state) in units of the FP32 weights
        "O0": (1, 0, 2),
        "O1": (1, 0, 2),
        "O2": (0.5, 1, 2),
        "O3": (0.5, 0, 1),
        "O4": (1, 0, 2),
        "O5": (0.5, 1, 2),
    }
    for level, units in expected.items():
        row = by_level[level]
        assert (row.weights, row.masters) == (units[0] * full, units[1] * full), level
        assert 0 <= row.state - units[2] * full < 1024, level


def test_the_picture_takes_a_run_that_diverged(demo, tmp_path):
    from curves import plot

    fine = demo.Result("digits", "accuracy, %", "O0", [2.0, 1.0, 0.5], 90.0, 1.0, 1, 1, 1, 1.0, 0)
    lost = demo.Result("digits", "accuracy, %", "O3", [2.0, float("inf"), float("nan")], 10.0, 1.0, 1, 1, 1, 1.0, 0)
    plot({"digits": [fine, lost]}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.slow
def test_every_level_learns_what_fp32_learns(demo, tmp_path):
    """The claim of the whole package, at the demo's full length. O3 is shown as it comes out."""
    results = {(r.task, r.level): r.held_out for r in demo.main(["--out", str(tmp_path / "curves.png")])}
    assert results["digits", "O0"] > 97
    assert results["gpt", "O0"] < 3.5
    for level in ("O1", "O2", "O4", "O5"):
        assert abs(results["digits", level] - results["digits", "O0"]) <= 1.0, level
        assert abs(results["gpt", level] - results["gpt", "O0"]) <= 0.05, level

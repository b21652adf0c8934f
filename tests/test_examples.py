"""The examples run as a user runs them, warnings as errors, and what they print is what they promise."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn", reason="the examples' digits come with scikit-learn")

EXAMPLES = Path(__file__).parents[1] / "examples"
# Run by name below, each with a test of what it shows. A new example without one fails test_every_example_is_tested.
# (test_recipes.py runs examples/recipes.)
SCRIPTS = ("minimal", "gan", "ddp", "fsdp", "opt_levels", "graph")
MODULES = ("data", "tasks", "curves")


def run(
    example: str,
    *arguments: str,
    cwd: Path,
    ranks: int = 0,
    options: tuple[str, ...] = ("-W", "error"),
    silent: bool = True,
) -> str:
    """What `python examples/<example>.py` prints. From another directory: it is the installed package that runs.

    With `ranks`, what `torchrun --nproc-per-node <ranks>` prints. Unless `silent`, it may tell of overflows on stderr.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    script = [sys.executable, *options, *launcher, str(EXAMPLES / f"{example}.py"), *arguments]
    # One thread: the models are tiny, and the tests may share their cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    if ranks:
        environment["PYTHONWARNINGS"] = "error"  # the launcher hands its own options on to nobody
    done = subprocess.run(script, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert not silent or done.stderr == "", "an example leaves nothing on stderr"
    return done.stdout


def number(pattern: str, printed: str) -> float:
    found = re.search(pattern, printed)
    assert found, f"{pattern!r} is not in:\n{printed}"
    return float(found[1])


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SCRIPTS, *MODULES}


SLOW = {level: pytest.param(level, marks=pytest.mark.slow) for level in ("O0", "O1", "O2", "O5")}


@pytest.mark.parametrize("level", [SLOW["O0"], "O1", "O2", SLOW["O5"]])
def test_minimal_learns(level, tmp_path):
    printed = run("minimal", "--opt-level", level, "--epochs", "4", cwd=tmp_path)
    assert number(rf"{level}: held-out accuracy ([\d.]+)%", printed) > 92


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="NCCL wants a GPU for each of the two ranks")
@pytest.mark.parametrize("level", SLOW.values())
def test_ddp_trains_what_one_process_trains_and_resumes_to_the_same_bits(level, tmp_path):
    def train(ranks: int, epochs: int, name: str) -> dict:
        arguments = ("--opt-level", level, "--epochs", str(epochs), "--checkpoint", str(tmp_path / name))
        printed = run("ddp", *arguments, cwd=tmp_path, ranks=ranks)
        assert len(re.findall(r"^epoch", printed, re.MULTILINE)) == (1 if name == "stopped" else epochs)
        assert number(rf"{level}: {ranks} ranks, held-out accuracy ([\d.]+)%", printed) > 75
        return torch.load(tmp_path / name)

    def tensors(checkpoint: dict) -> list:
        momenta = [entry["momentum_buffer"] for entry in checkpoint["optimizer"]["state"].values()]
        return [*checkpoint["model"].values(), *momenta]

    together = train(2, 2, "together")
    tolerance = {"O0": 1e-5, "O1": 2e-2, "O2": 2e-2}.get(level, 5e-2)
    for ours, alone in zip(tensors(together), tensors(train(1, 2, "alone")), strict=True):
        torch.testing.assert_close(ours, alone, rtol=tolerance, atol=tolerance)
    train(2, 1, "stopped")
    resumed = train(2, 2, "stopped")
    assert resumed["amp"] == together["amp"]
    assert all(map(torch.equal, tensors(resumed), tensors(together)))


@pytest.mark.parametrize("level", [SLOW["O1"], "O2"])
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


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="NCCL wants a GPU for each of the two ranks")
def test_fsdp_resumes_on_another_number_of_processes(tmp_path):
    level = "O2"
    flags = ("--opt-level", level, "--checkpoints", "saved", "--steps")
    begun = run("fsdp", *flags, "50", cwd=tmp_path, ranks=2, silent=False)
    resumed = run("fsdp", *flags, "100", cwd=tmp_path, ranks=1, silent=False)
    straight = run("fsdp", "--opt-level", level, "--steps", "100", cwd=tmp_path, ranks=2, silent=False)
    loss = [rf"step +{step}  loss ([\d.]+)" for step in (50, 100)]
    assert number(loss[0], begun) == number(loss[0], straight), "the same bits"
    # One process rounds the gradients of a whole batch to FP16 at once, two those of its halves.
    assert number(loss[1], resumed) == pytest.approx(number(loss[1], straight), abs=2e-2)
    bits = [number(rf"{level}: {n} ranks, held-out ([\d.]+)", out) for n, out in ((2, begun), (1, resumed))]
    assert 3.5 < bits[1] < bits[0] < 5


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

"""The examples run as a user runs them, warnings as errors, and what they print is what they promise."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paths import EXAMPLES, ROOT
from python_forks import python

from amp_patch import amp
from amp_patch.comparison.comparison import Comparison
from amp_patch.diagnose.recording.run import loads

pytestmark = pytest.mark.program

pytest.importorskip("sklearn", reason="the examples' digits come with scikit-learn")

# Run by name below, each with a test of what it shows. A new example without one fails test_every_example_is_tested.
# (test_recipes.py runs examples/recipes.)
SCRIPTS = ("minimal", "gan", "ddp", "fsdp", "train", "graph")
MODULES = ("data", "tasks")

WARNINGS: tuple[str, ...] = ("-W", "error")
if torch.__version__.startswith("2.6."):  # its first optimizer imports a module that removes a folder only at the end
    WARNINGS += ("-W", "ignore:Implicitly cleaning up")
if sys.version_info[:3] == (3, 13, 0):  # Dynamo says so
    WARNINGS += ("-W", "ignore:Guards may run slower on Python 3.13.0")


def run_example(
    example: str,
    *arguments: str,
    cwd: Path,
    ranks: int = 0,
    options: tuple[str, ...] = WARNINGS,
    silent: bool = True,
) -> str:
    """What `python examples/<example>.py` prints. From another directory: it is the installed package that runs.

    With `ranks`, what `torchrun --nproc-per-node <ranks>` prints. Unless `silent`, it may tell of overflows on stderr.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    script = [*options, *launcher, EXAMPLES / f"{example}.py", *arguments]
    # One thread: the models are tiny, and the tests may share their cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    if ranks:
        environment["PYTHONWARNINGS"] = "error"  # the launcher hands its own options on to nobody
    done = python(*script, cwd=cwd, env=environment)
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


@pytest.mark.parametrize("level", [SLOW["O0"], SLOW["O1"], "O2", SLOW["O5"]])
def test_minimal_learns(level, tmp_path):
    printed = run_example("minimal", "--opt-level", level, "--epochs", "4", cwd=tmp_path)
    assert number(rf"{level}: held-out accuracy ([\d.]+)%", printed) > 92


def test_minimal_needs_torch_alone():
    tree = ast.parse((EXAMPLES / "minimal.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = [getattr(node, "module", None) or node.names[0].name for node in imports]
    assert {name.partition(".")[0] for name in modules} == {"__future__", "argparse", "torch", "amp_patch"}


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="NCCL wants a GPU for each of the two ranks")
@pytest.mark.parametrize("level", SLOW.values())
def test_ddp_trains_what_one_process_trains_and_resumes_to_the_same_bits(level, tmp_path):
    def train(ranks: int, epochs: int, name: str) -> dict:
        arguments = ("--opt-level", level, "--epochs", str(epochs), "--checkpoint", str(tmp_path / name))
        printed = run_example("ddp", *arguments, cwd=tmp_path, ranks=ranks)
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
def test_gan_s_images_are_closer_to_digits_than_noise(level, tmp_path):
    printed = run_example("gan", "--opt-level", level, "--steps", "600", cwd=tmp_path)
    drawn, held_out, noise = (
        number(pattern, printed) for pattern in (r"drawn ([\d.]+)", r"held-out digits ([\d.]+)", r"noise ([\d.]+)")
    )
    assert held_out < drawn < (held_out + noise) / 2
    assert len(json.loads(re.search(r"loss scales (\[.*\])", printed)[1])) == 3


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_graph_trains_as_the_loop_beside_it(backend, tmp_path):
    options = (*WARNINGS, "-W", "ignore::DeprecationWarning")  # Inductor's imports bring one
    printed = run_example("graph", "--backend", backend, "--epochs", "4", cwd=tmp_path, options=options)
    both = re.findall(r"graph ([\d.]+)  eager ([\d.]+)", printed)
    assert len(both) == 4
    for graph, eager in both:
        assert float(graph) == pytest.approx(float(eager), abs=0 if backend == "eager" else 5e-3)
    assert number(r"held-out accuracy ([\d.]+)%", printed) > 92


@pytest.fixture
def train_task(monkeypatch, capsys):
    """train(task, level, *options): what examples/train.py logs, run in this process, with `steps` of its training."""
    monkeypatch.syspath_prepend(EXAMPLES)

    def train_task(task: str, level: str, *options: str) -> dict[str, float]:
        monkeypatch.setattr(sys, "argv", ["train.py", "--task", task, "--opt-level", level, *options])
        with amp.record(None) as recorded:
            runpy.run_path(str(EXAMPLES / "train.py"), run_name="__main__")
        amp.restore()
        figures = {name: values[-1][1] for name, values in recorded.logged.items()}
        printed = capsys.readouterr().out
        assert all(f"{name} {value:.4f}" in printed for name, value in figures.items())
        assert printed.startswith(f"{task}, {recorded.steps} steps, ")
        return {**figures, "level": recorded.level, "steps": recorded.steps, "dtype": recorded.dtype}

    yield train_task
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("task", "level", "steps", "better_than"),
    [("digits", "O2", 60, 0.5), ("lstm", "O3", 100, 3.2)],
)
def test_train_learns(train_task, task, level, steps, better_than):
    """In the text the frequencies of the letters alone give 3.3 nats."""
    start = train_task(task, level, "--steps", "1")
    end = train_task(task, level, "--steps", str(steps))
    assert (end["level"], end["dtype"], end["steps"]) == (level, "float16", steps)
    assert end["held_out_loss"] < better_than < start["held_out_loss"]
    if task == "digits":
        assert end["accuracy"] > 85
    else:
        assert end["bits"] == pytest.approx(end["held_out_loss"] / math.log(2))


def test_train_takes_a_type_and_a_seed(train_task):
    bf16 = train_task("lstm", "O2", "--dtype", "bfloat16", "--steps", "3")
    assert (bf16["level"], bf16["dtype"]) == ("O2", "bfloat16")
    losses = [train_task("lstm", "O0", "--steps", "3", "--seed", seed)["held_out_loss"] for seed in ("0", "0", "1")]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.slow
def test_the_demo_ends_with_the_table_and_the_report(tmp_path):
    """The Makefile's own command, with fewer levels, seeds and steps."""
    makefile = [
        "make",
        "-C",
        str(ROOT),
        "--no-print-directory",
        "-n",
        "-o",
        ".venv/installed",
        "demo",
        "BIN=",
    ]
    asked = subprocess.run(makefile, capture_output=True, text=True, check=True).stdout.replace("\\\n", " ")
    command = shlex.split(asked)
    assert command[:4] == ["/python", "-m", "amp_patch", "compare"]
    assert command[-4:-1] == ["--task", "wide_gpt", "--steps"]
    small = {"--levels": "O0,O3", "--seeds": "1", "--out": str(tmp_path / "demo"), "--steps": "4"}
    for option, value in small.items():
        command[command.index(option) + 1] = value
    done = subprocess.run(
        [sys.executable, *command[1:]],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for level in small["--levels"].split(","):
        assert re.search(rf"\b{level}\b", done.stdout), done.stdout
    assert done.stdout.rstrip().endswith(str(tmp_path / "demo" / "report.html"))
    comparison = Comparison.from_dict(loads((tmp_path / "demo" / "report.json").read_text()))
    assert [run.steps for run in comparison.runs] == [4, 4]
    assert all(math.isfinite(figure) for level in comparison.levels for figure in level.final)
    assert comparison.metric == "held_out_loss"

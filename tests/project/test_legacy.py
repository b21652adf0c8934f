"""The five programs of examples/legacy run as they are, and train at each level to what they train to at O0.

At O0 a program is a script without amp_patch to the bit (tests/frontend/test_levels.py); tests/optimizers/ and
tests/apex_surface/ compare Apex's optimizers, layers and functions with plain torch.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import EXAMPLES
from python_forks import python
from training import assert_unchanged

pytestmark = pytest.mark.program

pytest.importorskip("sklearn", reason="three of the legacy programs train on its digits")

LEGACY = EXAMPLES / "legacy"
LEVELS = ("O1", "O2", "O3")


def quick_at(quick: str, *levels: str) -> list[Any]:
    """Return the values of a test's level: `quick` runs in `make test`, `levels` are slow."""
    return [quick, *(pytest.param(level, marks=pytest.mark.slow) for level in levels)]


# Where there is no GPU, the programs written for one are told so; the others look for themselves.
WITH_GPU = torch.cuda.is_available()
WITHOUT_GPU = [] if WITH_GPU else ["--device", "cpu"]


@dataclass(frozen=True)
class Tolerance:
    """How far from the baseline a curve may be, relative to it: in the mean of the first five losses, in the mean
    distance over the whole curve, and in the mean of the last ten losses.

    Three times the largest gap of five seeds on a CPU, or more: FP16 rounds each value to 11 bits, and training carries
    that on. `start` is None where the first steps of FP16 are of another kind than those of FP32.
    """

    start: float | None
    curve: float
    end: float


@dataclass(frozen=True)
class Program:
    name: str
    learns: float | None  # the last ten losses of the baseline are below this part of its first
    tolerance: dict[str, Tolerance]
    for_cuda: bool = False
    options: list[str] = field(default_factory=list)  # at every level but O0, as a user would give them

    @property
    def path(self) -> str:
        return str(LEGACY / f"{self.name}.py")


PROGRAMS = {
    program.name: program
    for program in (
        Program(
            "classify",
            learns=0.1,
            for_cuda=True,
            tolerance={  # relative to 0.04 at the end: within 0.002
                "O1": Tolerance(2e-4, 7e-3, 4e-2),
                "O2": Tolerance(2e-4, 7e-3, 4e-2),
                "O3": Tolerance(2e-4, 7e-3, 4e-2),
            },
        ),
        Program(
            "dcgan",
            learns=None,  # two players: at the balance the discriminator's loss stays near 2 ln 2
            tolerance={  # a GAN doubles a difference every few steps; five seeds' FP32 curves lie further apart
                "O1": Tolerance(1e-3, 0.3, 0.15),
                "O2": Tolerance(1e-3, 0.3, 0.15),
                # Without masters and scale the first gradients of the generator are subnormal.
                "O3": Tolerance(0.15, 0.3, 0.15),
            },
        ),
        Program(
            "language_model",
            learns=0.65,
            tolerance={
                "O1": Tolerance(2e-5, 1e-3, 2e-3),
                "O2": Tolerance(2e-5, 1e-3, 2e-3),
                # Adam's second moments are squares of gradients around 1e-4: zero in FP16. O3 learns, worse.
                "O3": Tolerance(None, 0.4, 0.4),
            },
        ),
        Program(
            "bert",
            learns=0.75,
            for_cuda=True,
            tolerance={
                "O1": Tolerance(2e-4, 5e-4, 2.5e-3),
                "O2": Tolerance(2e-4, 5e-4, 2.5e-3),
                "O3": Tolerance(1.5e-3, 1e-3, 3e-3),
            },
        ),
        Program(
            "self_supervised",
            learns=0.8,
            tolerance={  # Sinkhorn takes up the order of sums
                "O1": Tolerance(3e-4, 8e-3, 2e-2),
                # The program drops gradients of the model, which at O2, as in Apex, are copies of the masters'.
                "O2": Tolerance(8e-3, 1.5e-2, 2e-2),
                "O3": Tolerance(6e-4, 8e-3, 2e-2),
            },
        ),
    )
}


class Runs:
    """Runs programs as users do, each into files of its own, and returns the curve that they write."""

    def __init__(self, folder: Path):
        self.folder, self.baselines, self.printed = folder, {}, ""

    def ours(self, program: Program, *arguments: str, launcher: tuple[str, ...] = ()) -> dict[str, Any]:
        """By `python -m amp_patch run ...`. `launcher`: what comes between python and -m."""
        device = WITHOUT_GPU if program.for_cuda else []
        return self._run(*launcher, "-m", "amp_patch", "run", *device, program.path, *arguments)

    def baseline(self, program: Program, *arguments: str) -> dict[str, Any]:
        """The same at O0. Run once for all levels."""
        key = (program.name, *arguments)
        if key not in self.baselines:
            self.baselines[key] = self.ours(program, "--opt-level", "O0", *arguments)
        return self.baselines[key]

    def _run(self, *command: str) -> dict[str, Any]:
        curve = self.folder / "curve"
        curve.unlink(missing_ok=True)
        warnings = ["-W", "error", "-W", "ignore:'pin_memory' argument"]  # asked for by classify, for its GPU
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = python(*warnings, *command, "--curve", str(curve), cwd=self.folder, env=environment)
        self.printed = done.stdout + done.stderr
        assert done.returncode == 0, self.printed[-4000:]
        return json.loads(curve.read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("legacy"))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def compare(result: dict[str, Any], baseline: dict[str, Any], tolerance: Tolerance) -> None:
    ours, plain = result["losses"], baseline["losses"]
    assert len(ours) == len(plain)
    if tolerance.start is not None:
        assert mean(ours[:5]) == pytest.approx(mean(plain[:5]), rel=max(tolerance.start, 1e-4 * WITH_GPU))
    distance = mean([abs(a - b) for a, b in zip(ours, plain, strict=True)]) / mean(plain)
    assert distance <= max(tolerance.curve, 1e-2 * WITH_GPU)
    assert mean(ours[-10:]) == pytest.approx(mean(plain[-10:]), rel=max(tolerance.end, 5e-2 * WITH_GPU))


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_baseline_learns(name, runs):
    losses = runs.baseline(PROGRAMS[name])["losses"]
    part = PROGRAMS[name].learns
    if part is None:
        assert 0.5 < mean(losses[-10:]) < 2, "neither player has won"
    else:
        assert mean(losses[-10:]) < part * losses[0]


# The options of its time, at one level.
OPTIONS = {("classify", "O2"): ["--keep-batchnorm-fp32", "True", "--loss-scale", "dynamic"]}


# In `make test` each program trains at one level, and O1 and O2 have programs each.
QUICK = {"classify": "O2", "dcgan": "O1", "language_model": "O1", "bert": "O2", "self_supervised": "O2"}


@pytest.mark.parametrize(
    ("name", "level"),
    [
        pytest.param(name, level, marks=[] if level == quick else pytest.mark.slow)
        for name, quick in QUICK.items()
        for level in LEVELS
    ],
)
def test_every_level_trains_to_the_losses_of_fp32(name, level, runs):
    program = PROGRAMS[name]
    result = runs.ours(program, "--opt-level", level, *OPTIONS.get((name, level), []))
    baseline = runs.baseline(program)
    compare(result, baseline, program.tolerance[level])
    if "norms" in result and level != "O3":
        # Of unscaled gradients: with the scale left in them they are tens of thousands of times the baseline's.
        assert mean(result["norms"]) == pytest.approx(mean(baseline["norms"]), rel=3e-2)


def load(path: Path) -> dict[str, Any]:
    checkpoint = torch.load(path, map_location="cpu")
    for group in checkpoint["optimizer"]["param_groups"]:
        group.pop("differentiable", None)  # torch gives it to the defaults of an optimizer that has been loaded
    return checkpoint


@pytest.mark.parametrize("level", quick_at("O1", "O0", "O2", "O3"))
def test_bert_resumes_to_the_bit(level, runs, tmp_path):
    program, straight, stopped = PROGRAMS["bert"], tmp_path / "straight", tmp_path / "stopped"
    options = ["--opt-level", level, "--max_steps", "20"]
    runs.ours(program, *options, "--output", str(straight))
    runs.ours(program, *options, "--steps", "10", "--output", str(stopped))
    assert load(stopped)["step"] == 10
    runs.ours(program, *options, "--output", str(stopped), "--resume_from_checkpoint", str(stopped))
    assert_unchanged(load(stopped), load(straight))


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="NCCL wants a GPU for each of the two ranks")
@pytest.mark.parametrize("level", LEVELS)
def test_two_ranks_share_one_batch(level, runs):
    """Batch norms, assignments and gradients are those of the whole batch: the curve is that of one process."""
    program = PROGRAMS["self_supervised"]
    result = runs.ours(program, "--opt-level", level, launcher=TORCHRUN)
    compare(result, runs.baseline(program), program.tolerance[level])

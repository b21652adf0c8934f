"""`compare` in a notebook, seeds, and the words of failed runs."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys

import pytest
import torch
from compared_runs import importable_fixture  # noqa: F401  the fixture `importable`
from torch import nn
from training import ADAM, ConvNet, convnet, images, train

from amp_patch import amp
from amp_patch.casts import install
from amp_patch.comparison.commands import compare_progress
from amp_patch.comparison.commands.compare_progress import Progress
from amp_patch.comparison.outcome import failure
from amp_patch.comparison.plan import Plan
from amp_patch.comparison.seeds import seeded
from amp_patch.diagnose.recording.recorder import Enough, Recorder
from amp_patch.diagnose.recording.run import EXITED, INTERRUPTED, OUT_OF_MEMORY, Failure, Run
from amp_patch.training.training import newest_training

pytestmark = pytest.mark.program


def test_amp_patch_does_not_import_tensorboard():
    code = "import sys, amp_patch; print('tensorboard' in sys.modules)"
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("False\n", "")


def draws() -> list[float]:
    return [random.random(), torch.rand(()).item()]


def test_seeded_shifts_the_seeds_of_its_body_and_is_undone_at_its_end():
    def body(seed: int, **how: bool) -> tuple[list[float], list[float], int, int]:
        with seeded(seed, **how):
            unseeded = draws()
            torch.manual_seed(5)
            random.seed(5)
            own = torch.Generator().manual_seed(5).initial_seed()
            return unseeded, draws(), torch.initial_seed(), own

    functions = torch.manual_seed, torch.random.manual_seed, torch.cuda.manual_seed_all, random.seed
    torch.manual_seed(1)
    random.seed(1)
    following = draws()
    torch.manual_seed(1)
    random.seed(1)
    zero, one, again, unmoved = body(0), body(1), body(1), body(1, shift=False)
    assert draws() == following
    assert functions == (torch.manual_seed, torch.random.manual_seed, torch.cuda.manual_seed_all, random.seed)
    assert one == again
    assert [zero[2], one[2], unmoved[2]] == [5, 5 + 1_000_003, 5]
    assert [zero[3], one[3], unmoved[3]] == [5, 5, 5]
    assert zero[0] != one[0] == unmoved[0] and zero[1] == unmoved[1] != one[1]
    assert all(a != b for a, b in zip(zero[1], one[1], strict=True))


def test_seeded_seeds_numpy_if_it_is_installed():
    numpy = pytest.importorskip("numpy")
    numpy.random.seed(1)
    following = numpy.random.rand()
    numpy.random.seed(1)
    seen = []
    for seed in (0, 1, 1):
        with seeded(seed):
            unseeded = numpy.random.rand()
            numpy.random.seed(2**32 - 1)
            seen.append((unseeded, numpy.random.rand()))
    assert numpy.random.rand() == following
    assert seen[0][0] != seen[1][0] and seen[0][1] != seen[1][1] and seen[1] == seen[2]


def failed_with(error: BaseException | None, steps: int = 0) -> Failure | None:
    run = Run("O2", loss=[1.0] * steps)
    recorder = Recorder([])
    recorder.enabled, recorder.losses = True, 1
    return failure(recorder, run, error)


def test_the_failure_of_a_run_is_one_line():
    assert failed_with(None, 3) is failed_with(Enough(), 3) is failed_with(SystemExit(), 3) is None
    assert failed_with(SystemExit(0)).words.startswith("the script never called step() of the optimizer that it trains")
    assert failed_with(SystemExit("bad\nluck"), 3) == ("the script exited saying bad luck", "", "")
    assert failed_with(SystemExit(3), 3) == ("the script exited with status 3", EXITED, "")
    assert failed_with(KeyboardInterrupt(), 3) == ("interrupted after 3 steps", INTERRUPTED, "")
    memory = failed_with(torch.OutOfMemoryError("CUDA"))
    assert memory == ("out of memory: torch.OutOfMemoryError: CUDA", OUT_OF_MEMORY, "")
    assert failed_with(RuntimeError("can't")) == ("RuntimeError: can't", "", "")
    assert failed_with(SyntaxError("wrong", ("f.py", 3, 1, "x ="))).words == "SyntaxError: wrong"
    assert len(failed_with(KeyError("x " * 1000)).words) <= 500
    noted = ValueError("first")
    noted.__notes__ = ["second"]
    assert failed_with(noted).words == "ValueError: first"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_the_run_and_the_step(terminal, monkeypatch):
    monkeypatch.setattr(compare_progress, "_SECONDS", 0.0)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stdout", out := Terminal() if terminal else io.StringIO())
    runs = Plan(("O0", "O2"), seeds=2, steps=40).runs()
    now = [0.0]
    progress = Progress(runs, 40, clock=lambda: now[0])
    progress.begin(2, 2)
    progress.show(runs[0])
    now[0] = 60.0
    runs[0].loss, runs[0].seconds = [0.5] * 30, [0.002] * 30
    progress.show(runs[0])
    progress.end(runs[0])
    progress.show(runs[1])
    runs[1].error = "ValueError: no"
    progress.end(runs[1])
    runs[2].error, runs[2].refused = "three lines to add", True
    progress.end(runs[2])
    shown = [line for line in out.getvalue().replace("\x1b[K", "").replace("\r", "\n").split("\n") if line]
    begun = "4 runs: 2 levels, 2 seeds each, at most 40 steps"
    ended = ["O0 seed 0: 30 of 40 steps, loss 0.5, 2 ms a step", "O2 seed 0: failed: ValueError: no"]
    steps = "0 of 4 runs, O0 seed 0, step"
    first = [f"[................] 0:00, {steps} 0 of 40"]
    silent = f"[###.............] 1:00, {steps} 30 of 40, loss 0.5, 2 ms a step"
    live = "[####............] 1:00, 1 of 4 runs, O2 seed 0, step 0 of 40"
    assert shown == [
        begun,
        *(first if terminal else []),
        silent,
        ended[0],
        *([live] if terminal else []),
        ended[1],
    ]


def built() -> tuple:
    model = convnet()
    return model, ADAM(model.parameters()), nn.functional.cross_entropy, [images(step) for step in range(5)]


def trains(level_seen: list[str] | None = None) -> None:
    model, optimizer, *_ = built()
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    train(model, optimizer, 5)


def test_compare_in_a_notebook_restores_random_states_trainings_and_variables():
    model = convnet(3)
    model, optimizer = amp.initialize(model, ADAM(model.parameters()), opt_level="O2", verbosity=0)
    mine = newest_training()
    alone = train(model, optimizer, 2)
    torch.manual_seed(4)
    following = torch.rand(3)
    torch.manual_seed(4)

    found = amp.compare(built, ["O0", "O1", "O2"], seeds=2)
    assert [(run.level, run.seed, run.steps, run.error) for run in found.runs] == [
        (level, seed, 5, None) for seed in (0, 1) for level in ("O0", "O1", "O2")
    ]
    assert found.comparable and found.title == "built"
    assert [run.dtype for run in found.runs[:3]] == [None, "float16", "float16"]
    # The same training, made by build_fn itself; and without amp_patch.
    itself = amp.compare(trains, ["O0", "O1", "O2"], seeds=2)
    assert [run.loss for run in itself.runs] == [run.loss for run in found.runs]
    assert torch.equal(torch.rand(3), following)
    plain, plain_optimizer, loss_fn, batches = built()
    losses = []
    for inputs, targets in batches:
        plain_optimizer.zero_grad()
        loss = loss_fn(plain(inputs), targets)
        loss.backward()
        plain_optimizer.step()
        losses.append(loss.item())
    assert losses == found.runs[0].loss != found.runs[2].loss and found.runs[3].loss != losses

    assert "AMP_PATCH_OPT_LEVEL" not in os.environ
    assert newest_training() is mine and type(model) is not ConvNet
    again = convnet(3)
    again, again_optimizer = amp.initialize(again, ADAM(again.parameters()), opt_level="O2", verbosity=0)
    assert alone + train(model, optimizer, range(2, 5)) == train(again, again_optimizer, 5)
    amp.restore()
    amp.compare(built, ["O1"], seeds=1)
    assert not install.installed() and newest_training() is None


def test_compare_in_a_notebook_applies_steps_dtype_and_evaluate(capsys):
    modes = []

    def evaluate(model: nn.Module) -> float:
        modes.append((model.training, torch.is_grad_enabled()))
        return model(images(9)[0]).sum().item()

    found = amp.compare(built, ["O2", "O5"], seeds=1, steps=7, dtype=torch.bfloat16, evaluate=evaluate)
    assert [(run.steps, run.dtype) for run in found.runs] == [(7, None), (7, "bfloat16"), (7, "bfloat16")]
    assert modes == [(False, False)] * 3 and found.metric == "evaluation"
    assert all(len(run.logged["evaluation"]) == 1 and run.peak_memory is None for run in found.runs)
    assert found.runs[1].logged == found.runs[2].logged != found.runs[0].logged  # O2 in bfloat16 is O5
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 3 and printed[1].startswith("O2 seed 0: 7 of 7 steps, loss ")
    figures = {"sum": 1, "other": 2.0}
    named = amp.compare(built, ["O0", "O2"], seeds=1, metric="sum", evaluate=lambda _: figures, verbosity=0)
    assert named.metric == "sum" and named.comparable and capsys.readouterr().out == ""
    assert [run.steps for run in amp.compare(trains, ["O2"], steps=3).runs] == [3] * 6


def test_compare_in_a_notebook_keeps_rows_after_errors_and_an_interrupt():
    def goes_wrong() -> None:
        if os.environ["AMP_PATCH_OPT_LEVEL"] == "O1":
            raise ValueError("at O1")
        if os.environ["AMP_PATCH_OPT_LEVEL"] == "O3":
            sys.exit(3)
        if os.environ["AMP_PATCH_OPT_LEVEL"] == "O4":
            return
        trains()
        if os.environ["AMP_PATCH_OPT_LEVEL"] == "O5":
            raise KeyboardInterrupt

    found = amp.compare(goes_wrong, ["O0", "O1", "O2", "O3", "O4", "O5"], seeds=2)
    assert [(run.level, run.seed, run.steps) for run in found.runs] == [
        ("O0", 0, 5), ("O1", 0, 0), ("O2", 0, 5), ("O3", 0, 0), ("O4", 0, 0), ("O5", 0, 5)
    ]  # fmt: skip
    errors = [run.error for run in found.runs]
    assert errors[0] is errors[2] is None and errors[1] == "ValueError: at O1"
    assert errors[3] == "the script exited with status 3" and "never called amp.initialize" in errors[4]
    assert errors[5] == "interrupted after 5 steps"
    assert found.comparable and "AMP_PATCH_OPT_LEVEL" not in os.environ


def test_compare_refuses_an_invalid_build_fn():
    with pytest.raises(TypeError, match="build_fn returned 2 values; wanted"):
        amp.compare(lambda: built()[:2])
    same = built()
    with pytest.raises(ValueError, match="the same model twice"):
        amp.compare(lambda: same)
    with pytest.raises(ValueError, match="'O8' is none of O0"):
        amp.compare(built, ["O0", "O8"])
    with pytest.raises(TypeError, match="levels is 'O0,O2'; wanted a list"):
        amp.compare(built, "O0,O2")
    with pytest.raises(ValueError, match="batches of build_fn gave nothing"):
        amp.compare(lambda: (*built()[:3], []), ["O0", "O2"])
    assert not install.installed() and newest_training() is None and type(same[0]) is ConvNet


def test_a_comparison_shows_its_report_in_a_notebook():
    found = amp.compare(built, ["O0", "O2"], seeds=1)
    assert " ".join(repr(found).split()).startswith(found.summary) and "\nbuilt, 5 steps\n" in repr(found)
    assert "O2 FP16 " in repr(found) and len(repr(found)) < 1500
    shown = found._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and shown.count('"') == 4 and "&lt;" in shown

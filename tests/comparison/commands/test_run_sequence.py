"""The order in which the runs of a comparison are made, and their failures."""

from __future__ import annotations

import argparse
import signal
from typing import Any, ClassVar

import pytest

from amp_patch.comparison.commands import run_sequence
from amp_patch.comparison.commands.interrupts import Ended, Interrupts
from amp_patch.comparison.commands.run_sequence import RunSequence, ScriptFailed
from amp_patch.comparison.plan import Plan
from amp_patch.diagnose.recording.run import INTERRUPTED, OUT_OF_MEMORY, OVERDUE, Failure, Run


class Made:
    """Stand-in for a process: `results` has what its run ends with, by level."""

    results: ClassVar[dict[str, Any]] = {}
    order: ClassVar[list[str]] = []
    begun: ClassVar[list[Made]] = []

    def __init__(self, plan, args, run, load):
        self.run, self.kept, self.killed = run, None, False
        self.begun.append(self)

    def train(self, look):
        self.order.append(f"{self.run.level}{self.run.seed}")
        result = self.results.get(self.run.level)
        if isinstance(result, dict):
            for name, value in result.items():
                setattr(self.run, name, value)
        if not (isinstance(result, Failure) and result.kind == "before its first step"):
            self.run.loss.append(1.0)
        if isinstance(result, BaseException):
            raise result
        if isinstance(result, Failure):
            kind = "" if result.kind == "before its first step" else result.kind
            self.run.error, self.run.error_kind, self.run.error_where = result._replace(kind=kind)

    def keep_outcome(self):
        self.kept = self.run.error

    def interrupt(self, until, hurried):
        assert not hurried()
        self.run.error, self.run.error_kind = f"interrupted after {self.run.steps} steps", INTERRUPTED

    def kill(self):
        self.killed = True


@pytest.fixture
def order(monkeypatch):
    monkeypatch.setattr(run_sequence, "Child", Made)
    monkeypatch.setattr(Made, "results", {})
    monkeypatch.setattr(Made, "order", order := [])
    monkeypatch.setattr(Made, "begun", [])
    return order


def take() -> tuple[list[Run], int]:
    sequence = RunSequence(Plan(("O2", "O4"), seeds=2), argparse.Namespace(levels=None), Interrupts())
    interrupted = sequence.train()
    return sequence.runs, interrupted


def names(runs: list[Run]) -> list[str]:
    return [f"{run.level}{run.seed}" for run in runs]


ALL = ["O00", "O20", "O40", "O01", "O21", "O41"]


def test_the_levels_of_a_seed_follow_each_other(order):
    runs, interrupted = take()
    assert order == names(runs) == ALL and not interrupted


def test_a_native_script_gets_a_row_for_its_own_precision(order):
    Made.results["O0"] = {"native": True}
    runs, _ = take()
    assert order == names(runs) == ["O00", "O20", "O40", "native0", "O01", "O21", "O41", "native1"]


def test_a_script_with_low_weights_gets_a_row_with_masters(order):
    Made.results["O0"] = {"weights_type": "bfloat16"}
    runs, _ = take()
    levels = ("O0", "O2", "O4", "O5", "O5+split", "O5+split+8bit")
    assert order == names(runs) == [f"{level}{seed}" for seed in range(2) for level in levels]
    # If a level of the plan has masters of that type, no level is added.
    runs = [Run(level, 0, weights_type="float16" if level == "O0" else "") for level in ("O0", "O2")]
    sequence = RunSequence(Plan(("O2",), seeds=1), argparse.Namespace(levels="O2"), Interrupts(), runs)
    assert names(sequence.runs) == ["O00", "O20"]
    # A resumed comparison derives the added level from its runs.
    runs[0].weights_type = "bfloat16"
    sequence = RunSequence(Plan(("O2",), seeds=1), argparse.Namespace(levels="O2"), Interrupts(), runs)
    assert names(sequence.runs) == ["O00", "O20", "O50"]


def test_a_level_with_a_step_that_is_overdue_gets_no_other_seed(order):
    Made.results["O2"] = Failure("step 2 had taken about 2 minutes", OVERDUE)
    runs, _ = take()
    assert order == names(runs) == ["O00", "O20", "O40", "O01", "O41"]
    assert runs[1].error == "step 2 had taken about 2 minutes"


def test_an_interrupt_keeps_runs_that_took_steps(order):
    Made.results["O2"] = Ended(signal.SIGINT)
    runs, interrupted = take()
    assert interrupted == 130 and names(runs) == ["O00", "O20"]
    assert [run.error for run in runs] == [None, "interrupted after 1 steps"]
    assert [child.kept for child in Made.begun] == [run.error for run in runs]


def test_a_process_is_ended_with_an_error_of_the_command(order):
    Made.results["O2"] = MemoryError()
    with pytest.raises(MemoryError):
        take()
    assert [child.killed for child in Made.begun] == [False, True]


def test_other_seeds_are_skipped_if_every_level_fails_with_the_first(order, capsys):
    """Failures after the first step. A failure before it ends the comparison at once."""
    for level in ("O0", "O2", "O4"):
        Made.results[level] = Failure("KeyError: 'x'", "", "train.py, line 3")
    runs, interrupted = take()
    assert order == names(runs) == ["O00", "O20", "O40"] and not interrupted
    assert "every level has failed with seed 0: other seeds are not tried" in capsys.readouterr().out


def test_a_script_that_fails_before_its_first_step_is_started_once(order, capsys):
    Made.results["O0"] = Failure("KeyError: 'x'", "before its first step", "train.py, line 3")
    with pytest.raises(ScriptFailed, match=r"at O0, before its first step: KeyError: 'x' \(train.py, line 3\)$"):
        take()
    assert order == ["O00"] and [child.kept for child in Made.begun] == ["KeyError: 'x'"]
    assert "KeyError" not in capsys.readouterr().out, "said once, by whoever catches it"


def test_a_first_level_that_runs_out_of_memory_is_a_row(order):
    Made.results["O0"] = Failure("out of memory: MemoryError", OUT_OF_MEMORY)
    runs, _ = take()
    assert order == names(runs) == ALL


# --- as a user starts it ---

"""What a comparison prints while it trains, and the end of runs whose step takes too long."""

from __future__ import annotations

import pytest

from amp_patch.comparison.commands.compare_progress import Progress
from amp_patch.comparison.commands.long_steps import LongSteps
from amp_patch.comparison.plan import Plan
from amp_patch.diagnose.recording.run import Run


def stuck(steps: int, later: float, seconds: float = 1.0) -> str | None:
    """What is said of an O5 that made `steps` steps, and has made none for `later` seconds; O0 has made one more."""
    now, (exact, low) = [0.0], Plan(("O0", "O5"), seeds=1).runs()
    long_steps = LongSteps(lambda: now[0])
    for run, made in (exact, steps + 1), (low, steps):
        assert long_steps.overdue(run) is None
        now[0] += 30.0  # the start-up
        for _ in range(made):
            now[0] += seconds
            run.loss.append(1.0)
            run.seconds.append(seconds)
            assert long_steps.overdue(run) is None
    now[0] += later
    return long_steps.overdue(low)


@pytest.mark.parametrize("steps", [0, 3])
def test_a_step_that_takes_a_hundred_times_as_long_as_any_of_o0_is_overdue(steps):
    assert stuck(steps, 119.0) is None
    words = stuck(steps, 125.0)
    assert words.startswith(f"step {steps + 1} had taken about 2 minutes") and "at O0 no step took more than 1" in words
    assert "keep_fp32=" in words
    assert stuck(steps, 900.0, seconds=10.0) is None
    assert stuck(steps, 1100.0, seconds=10.0) is not None


def test_what_a_script_does_between_two_steps_is_not_overdue_before_o0_has_done_it():
    now, (exact, low) = [0.0], Plan(("O0", "O5"), seeds=1).runs()
    long_steps = LongSteps(lambda: now[0])
    for run in (exact, low):
        long_steps.overdue(run)
        now[0] += 1.0
        run.loss += [1.0] * 4
        run.seconds += [0.1] * 4
        long_steps.overdue(run)
    now[0] += 1e5  # an evaluation
    assert long_steps.overdue(low) is None


def test_the_first_level_of_each_seed_is_never_overdue():
    now, runs = [0.0], Plan(("O0", "O5"), seeds=2).runs()
    long_steps = LongSteps(lambda: now[0])
    for run in sorted(runs, key=lambda run: run.seed):
        for _ in range(3):
            assert long_steps.overdue(run) is None
            now[0] += 1e5 if run.level == "O0" else 1.0
            run.loss.append(1.0)


def test_a_resumed_comparison_counts_finished_runs(capsys):
    runs = Plan(("O0", "O2"), seeds=2).runs()
    progress = Progress(runs[2:], 10, finished=2)
    progress.begin(2, 2)
    assert capsys.readouterr().out == "4 runs: 2 levels, 2 seeds each, of which 2 have finished, at most 10 steps\n"
    assert progress.line(runs[2]) == "[................] 0:00, 2 of 4 runs, O0 seed 1, step 0 of 10"


def test_progress_prints_a_line_every_half_minute_without_a_terminal(capsys):
    run, now = Run("O0"), [0.0]
    progress = Progress([run, Run("O2")], None, clock=lambda: now[0])
    for second in range(0, 91, 5):
        now[0] = float(second)
        progress.show(run)
    assert capsys.readouterr().out.splitlines() == [
        f"[................] {at}, 0 of 2 runs, O0 seed 0, step 0" for at in ("0:25", "0:50", "1:15")
    ]


def test_an_error_that_several_runs_have_is_printed_once(capsys):
    runs = [Run(level, error=error) for level, error in (("O0", "no data"), ("O4", "no data"), ("O5", "no memory"))]
    progress = Progress(runs, None)
    for run in runs:
        progress.end(run)
    assert capsys.readouterr().out.splitlines() == [
        "O0 seed 0: failed: no data",
        "O4 seed 0: failed as O0 seed 0 did",
        "O5 seed 0: failed: no memory",
    ]


def test_progress_survives_a_closed_terminal(monkeypatch):
    class Closed:
        def isatty(self) -> bool:
            return True

        def write(self, _: str) -> int:
            raise OSError(5, "Input/output error")

        def flush(self) -> None: ...

    monkeypatch.setattr("sys.stdout", Closed())
    progress = Progress(Plan(("O0", "O2"), seeds=1).runs(), 10)
    progress.begin(2, 1)
    progress.close()

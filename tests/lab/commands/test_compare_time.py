"""How long a comparison will take, told from its first steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from amp_patch.lab.commands.compare_progress import Progress
from amp_patch.lab.commands.compare_time import RunTimes
from amp_patch.lab.comparison.plan import Plan
from amp_patch.lab.recording.run import Run

STEPS = 100
A_STEP = {"O0": 0.5, "O4": 0.4, "O5": 2.0}


class Training:
    """Runs of STEPS steps and a start-up, on a clock that is made up; `looks` is called as the scheduler does."""

    def __init__(self, asked: int | None, start_up: float, end: float = 0.0) -> None:
        self.now = 0.0
        self.runs = Plan(tuple(A_STEP), seeds=3, steps=asked).runs()
        self.times = RunTimes(self.runs, asked, lambda: self.now)
        self.start_up, self.end = start_up, end
        self.told: list[tuple[float, float | None]] = []

    def train(self, run: Run, until: float = 1e9) -> bool:
        """A turn: whether the run has ended."""
        begun = self.now
        if not run.steps:
            self.now += self.start_up
            self.look(run)
        while self.now - begun < until or not run.steps:
            if run.steps == STEPS:
                self.now += self.end
                self.times.end(run)
                return True
            self.now += A_STEP[run.level]
            run.loss.append(1.0)
            self.look(run)
        return False

    def look(self, run: Run) -> None:
        self.times.look(run)
        self.told.append((self.now, self.times.total()))

    def in_turns(self) -> None:
        for seed in range(3):
            waiting = [run for run in self.runs if run.seed == seed]
            while waiting:
                waiting = [run for run in waiting if not self.train(run, until=0.5)]

    def one_by_one(self) -> None:
        for run in self.runs:
            self.train(run)


def first(told: list[tuple[float, float | None]]) -> tuple[float, float]:
    return next((now, total) for now, total in told if total is not None)


def every(told: list[tuple[float, float | None]]) -> Iterator[float]:
    return (total for _, total in told if total is not None)


def stuck(steps: int, later: float, seconds: float = 1.0) -> str | None:
    """What is said of an O5 that made `steps` steps, and has made none for `later` seconds; O0 has made one more."""
    now, (exact, low) = [0.0], Plan(("O0", "O5"), seeds=1, steps=STEPS).runs()
    times = RunTimes([exact, low], STEPS, lambda: now[0])
    for run, made in (exact, steps + 1), (low, steps):
        now[0] += 30.0  # the start-up
        for _ in range(made):
            now[0] += seconds
            run.loss.append(1.0)
            run.seconds.append(seconds)
            times.look(run)
    now[0] += later
    times.look(low)
    assert times.overdue(exact) is None
    return times.overdue(low)


@pytest.mark.parametrize("steps", [0, 3])
def test_a_step_that_takes_a_hundred_times_as_long_as_any_of_o0_is_overdue(steps):
    assert stuck(steps, 119.0) is None
    words = stuck(steps, 125.0)
    assert words.startswith(f"step {steps + 1} had taken about 2 minutes") and "at O0 no step took more than 1" in words
    assert "keep_fp32=" in words
    assert stuck(steps, 900.0, seconds=10.0) is None
    assert stuck(steps, 1100.0, seconds=10.0) is not None


def test_what_a_script_does_between_two_steps_is_not_overdue_before_o0_has_done_it():
    now, (exact, low) = [0.0], Plan(("O0", "O5"), seeds=1, steps=STEPS).runs()
    times = RunTimes([exact, low], STEPS, lambda: now[0])
    for run in (exact, low):
        now[0] += 1.0
        run.loss += [1.0] * 4
        run.seconds += [0.1] * 4
        times.look(run)
    now[0] += 1e5  # an evaluation
    times.look(low)
    assert times.overdue(low) is None


@pytest.mark.parametrize("start_up", [0.5, 60.0])
def test_the_first_steps_of_all_levels_predict_the_whole_time(start_up):
    made = Training(STEPS, start_up)
    made.in_turns()
    now, total = first(made.told)
    assert total == pytest.approx(made.now, rel=0.02) and now < 3 * start_up + 5 * sum(A_STEP.values())
    assert all(each == pytest.approx(made.now, rel=0.02) for each in every(made.told))
    assert made.times.left() == 0


def test_the_first_run_predicts_runs_that_are_made_one_by_one():
    made = Training(STEPS, 60.0)
    made.train(made.runs[0], until=63.0)
    assert made.times.total() == pytest.approx(9 * 110) and made.times.only_level == "O0"
    made.one_by_one()
    assert made.times.left() == 0 and made.times.only_level is None


def test_a_prediction_without_a_number_of_steps_waits_for_the_end_of_a_run():
    made = Training(None, 10.0, end=30.0)
    made.in_turns()
    now, total = first(made.told)
    assert now > 3 * 10 and total == pytest.approx(made.now, rel=0.05), "what follows the steps is counted too"
    assert any(run.steps == STEPS for run in made.runs)


def test_a_failed_run_predicts_only_its_own_level():
    now = [0.0]
    runs = Plan(("O0", "O2", "O4"), seeds=2, steps=10).runs()
    times = RunTimes(runs, 10, lambda: now[0])
    runs[0].error = "boom"
    now[0] = 5.0
    times.end(runs[0])
    assert times.left() is None, "it says nothing of the others"
    runs[1].loss = [1.0] * 10
    now[0] = 25.0
    times.end(runs[1])
    assert times.left() == 20 + 5 + 20 + 20


def test_a_script_that_ends_early_corrects_the_prediction():
    made = Training(10 * STEPS, 1.0)
    made.in_turns()
    assert made.told[-1][1] == pytest.approx(made.now) and made.times.steps == STEPS


@pytest.mark.parametrize(
    ("steps", "seeds", "line"),
    [
        (200, 3, "6 runs: 2 levels, 3 seeds each, at most 200 steps"),
        (200, 1, "2 runs: 2 levels, 1 seed, at most 200 steps"),
        (
            None,
            3,
            "6 runs: 2 levels, 3 seeds each; how long they take without --steps is known when the first has ended",
        ),
    ],
)
def test_compare_prints_the_number_of_runs_before_the_first(steps, seeds, line, capsys):
    Progress(Plan(("O0", "O2"), seeds=seeds).runs(), steps).begin(2, seeds)
    assert capsys.readouterr().out == line + "\n"


def test_a_tenth_step_without_a_number_of_steps_predicts_a_shorter_comparison(capsys):
    now = [0.0]
    runs = Plan(tuple(A_STEP), seeds=3).runs()
    progress = Progress(runs, None, clock=lambda: now[0])
    now[0] = 5.0
    for _ in range(9):
        runs[0].loss.append(1.0)
        progress.show(runs[0])
        now[0] += 0.5
    assert capsys.readouterr().out == ""
    runs[0].loss.append(1.0)
    progress.show(runs[0])
    now[0] += 0.5
    progress.show(runs[0])
    said = "O0 takes 500 ms a step; --steps 100 would take about 8 minutes for all 9 runs\n"  # 9 * (5 + 49.5) seconds
    assert capsys.readouterr().out == said, "once"
    runs[0].loss += [1.0] * 2000
    now[0] += 1000.0
    progress.end(runs[0])
    assert ", if the other levels take as long as O0; --steps 100 would take about" in capsys.readouterr().out


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

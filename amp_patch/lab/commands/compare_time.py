"""Estimates of the time of a comparison, from the steps so far."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from amp_patch.lab.recording.run import Run
from amp_patch.lab.wording import about, clock_time

OVERDUE_TIMES = 100  # a step is overdue if it takes this many times the longest step of the first level ...
OVERDUE_SECONDS = 120.0  # ... and this long
_STEPS = 3  # timed steps before an estimate: fewer give a poor one
_ALONE = 2.0  # seconds of timed steps before an estimate from a single run


@dataclass
class _Timed:
    """The measured times of one run, in seconds of its turns.

    Attributes:
        level: the requested level.
        spent: the seconds of its turns so far.
        first_at, first_steps: `spent` and the number of steps when steps were first observed, after the start-up.
        last_at, last_steps: `spent` and the number of steps when that number last grew.
        longest_gap: the longest time from one step to the next, with what the script does between them.
    """

    run: Run
    level: str
    spent: float = 0.0
    first_at: float = 0.0
    first_steps: int = 0
    last_at: float = 0.0
    last_steps: int = 0
    longest_gap: float = 0.0
    ended: bool = False

    def add(self, seconds: float) -> None:
        self.spent += seconds
        if self.run.steps > self.last_steps:
            self.longest_gap = max(self.longest_gap, self.spent - self.last_at) if self.last_steps else 0.0
            self.last_at, self.last_steps = self.spent, self.run.steps
            if not self.first_steps:
                self.first_at, self.first_steps = self.last_at, self.last_steps

    @property
    def seconds_a_step(self) -> float | None:
        steps = self.last_steps - self.first_steps
        return (self.last_at - self.first_at) / steps if steps >= _STEPS else None

    @property
    def longest_step(self) -> float:
        """The seconds of the longest step, or of the whole run so far if no step was timed."""
        timed = [self.longest_gap, *filter(math.isfinite, self.run.seconds)]
        return max(timed) or self.last_at

    def whole(self, steps: int, end: float) -> float | None:
        """Measure or estimate the seconds of the whole run.

        If the run has ended, they were measured. Otherwise they are estimated: the time of `steps` steps, and `end`
        seconds from the last step to the end of the process. None if too few steps were timed for an estimate.
        """
        if self.ended:
            return self.spent
        a_step = self.seconds_a_step
        return None if a_step is None else self.last_at + max(0, steps - self.last_steps) * a_step + end


class RunTimes:
    """A timer of the runs of a comparison, of which one trains at a time.

    Args:
        runs: all runs of the comparison; the list may grow.
        steps: the number of steps after which each run is ended; None if the script decides.
        clock: returns seconds.
    """

    def __init__(self, runs: list[Run], steps: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._runs = runs
        self._asked = steps
        self._clock = clock
        self._begun = self._since = clock()
        self._timed: dict[int, _Timed] = {}  # id of a run that has begun -> its times

    @property
    def steps(self) -> int | None:
        """The expected number of steps of a run; None if it is unknown.

        If a run has ended without error, it is the number of steps of the longest one, else the requested number.
        """
        taken = [timed.run.steps for timed in self._timed.values() if timed.ended and timed.run.error is None]
        return max(taken, default=self._asked)

    @property
    def only_level(self) -> str | None:
        """If all runs that have begun are of one level, and runs of other levels are still to begin, that level.

        None if two levels have begun, if none has, or if all runs are of one level.
        """
        begun = {timed.level for timed in self._timed.values()}
        others = {run.level for run in self._runs if id(run) not in self._timed} - begun
        return next(iter(begun)) if others and len(begun) == 1 else None

    def look(self, run: Run) -> None:
        """Add the time since the last call of `look` or `end` to the time of `run`: only `run` has trained since."""
        now = self._clock()
        self._timed.setdefault(id(run), _Timed(run, run.level)).add(now - self._since)
        self._since = now

    def end(self, run: Run) -> None:
        """Add the time since the last call of `look` or `end` to the time of `run`, and mark the run as ended."""
        self.look(run)
        self._timed[id(run)].ended = True

    def left(self) -> float | None:
        """Estimate the seconds until the last run ends.

        The result is None if no run has begun, the number of steps is unknown, or a begun run has too few timed steps.
        It is also None if a level without an estimate has runs to begin, and no run has ended without error.
        """
        steps = self.steps
        if steps is None or not self._timed:
            return None
        there = [self._timed[id(run)] for run in self._runs if id(run) in self._timed]
        ends = [each.spent - each.last_at for each in there if each.ended and each.run.error is None]
        end = statistics.mean(ends) if ends else 0.0
        left = 0.0
        of_level: dict[str, list[float]] = {}
        well: list[float] = []
        for timed in there:
            whole = timed.whole(steps, end)
            if whole is None:
                return None
            left += max(0.0, whole - timed.spent)
            of_level.setdefault(timed.level, []).append(whole)
            if timed.run.error is None:
                well.append(whole)
        if len(there) == 1 and not there[0].ended and there[0].last_at - there[0].first_at < _ALONE:
            return None
        waiting = [run for run in self._runs if id(run) not in self._timed]
        known = [of_level.get(run.level, well) for run in waiting]
        return left + sum(map(statistics.mean, known)) if all(known) else None

    def seconds_a_step(self, run: Run) -> float | None:
        """Return the mean seconds of a step of `run`; None if too few of its steps were timed."""
        return self._timed[id(run)].seconds_a_step if id(run) in self._timed else None

    def overdue(self, run: Run) -> str | None:
        """If the step that `run` makes takes far longer than any of the first level's, say so; otherwise return None.

        The first level's run with the same seed must have made that step: the script may do other work before it.
        """
        timed = self._timed.get(id(run))
        first = next((each for each in self._timed.values() if each.run.seed == run.seed), None)
        if timed is None or first is None or first.last_steps <= timed.last_steps:
            return None
        taken = timed.spent - timed.last_at - (0.0 if timed.last_steps else first.first_at)
        if taken < max(OVERDUE_SECONDS, OVERDUE_TIMES * first.longest_step):
            return None
        longest = clock_time(first.longest_step)
        return (
            f"step {timed.last_steps + 1} had taken {about(taken)} when it was ended; at {first.level} no step took "
            f"more than {longest}. A loop that ends by a tolerance, as an adaptive solver's, may not reach it in low "
            "precision: give it a larger tolerance, or keep its module in FP32 by keep_fp32="
        )

    def total_of(self, steps: int) -> float | None:
        """Estimate the seconds of all runs if each takes `steps` steps; None if no run has enough timed steps.

        A level with too few timed steps is expected to take the mean time of the other levels' runs.
        """
        of_level: dict[str, list[float]] = {}
        for timed in self._timed.values():
            if timed.seconds_a_step is not None:
                known = timed.first_at + max(0, steps - timed.first_steps) * timed.seconds_a_step
                of_level.setdefault(timed.level, []).append(known)
        if not of_level:
            return None
        mean = statistics.mean(each for known in of_level.values() for each in known)
        return sum(statistics.mean(of_level.get(self._level_of(run), [mean])) for run in self._runs)

    def total(self) -> float | None:
        """Estimate the seconds from the start of the first run to the end of the last; None if `left` returns None."""
        left = self.left()
        return None if left is None else self._since - self._begun + left

    def _level_of(self, run: Run) -> str:
        """Return the requested level of a run. While it trains, `run.level` is the recorded level, which may differ."""
        return self._timed[id(run)].level if id(run) in self._timed else run.level

"""Steps of a compared run that take far longer than those of the first level, as a loop that does not converge."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from amp_patch.diagnose.recording.run import Run
from amp_patch.diagnose.wording import about, clock_time

OVERDUE_TIMES = 100  # a step is overdue if it takes this many times the longest step of the first level ...
OVERDUE_SECONDS = 120.0  # ... and this long


class LongSteps:
    """A detector of overdue steps in runs that follow each other; `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._run: Run | None = None  # the run that trains
        self._first: Run | None = None  # the first run with its seed
        self._steps, self._since = 0, 0.0  # the run's number of steps, and the time when that grew, or of its start
        self._waits: list[float] = []  # seconds of the first run: until its first step, and between two steps

    def overdue(self, run: Run) -> str | None:
        """If the step that `run` makes takes far longer than any of the first level's, say so; otherwise return None.

        The first level's run with the same seed must have made that step: the script may do other work before it. The
        caller calls this often while `run` trains.
        """
        now = self._clock()
        if run is not self._run:
            self._run, self._steps, self._since = run, 0, now
        if self._first is None or self._first.seed != run.seed:
            self._first, self._waits = run, []
        first = self._first
        if run.steps > self._steps:
            self._waits += [now - self._since] if run is first else []
            self._steps, self._since = run.steps, now
        if first.steps <= self._steps or not self._waits:
            return None
        longest = max([0.0, *self._waits[1:], *filter(math.isfinite, first.seconds)]) or self._waits[0]
        taken = now - self._since - (0.0 if self._steps else self._waits[0])
        if taken < max(OVERDUE_SECONDS, OVERDUE_TIMES * longest):
            return None
        return (
            f"step {self._steps + 1} had taken {about(taken)} when it was ended; at {first.level} no step took "
            f"more than {clock_time(longest)}. A loop that ends by a tolerance, as an adaptive solver's, may not reach "
            "it in low precision: give it a larger tolerance, or keep its module in FP32 by keep_fp32="
        )

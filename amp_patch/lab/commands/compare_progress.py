"""What a comparison costs, and how far it is.

A line says how many runs there will be, one how long they will take, and one what became of each run that has ended; in
a terminal there is one for the run that trains.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable

from amp_patch.lab.commands.compare_time import RunTimes
from amp_patch.lab.comparison.plan import newest_figures, progress_line
from amp_patch.lab.recording.run import Run
from amp_patch.lab.wording import about, counted

_SECONDS = 0.2  # between two looks of the terminal's line
_NO_STEPS = "; how long they take without --steps is known when the first has ended"
_CLEAR = "\r\x1b[K"


class Progress:
    """Prints to sys.stdout.

    Args:
        runs: all of the comparison; the list may grow.
        steps: of a run, if that is known.
        clock: in seconds.
    """

    def __init__(self, runs: list[Run], steps: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._runs = runs
        self._asked = self._steps = steps
        self._ended = 0
        self._shown = 0.0
        self._alive = sys.stdout.isatty()
        self._times = RunTimes(runs, steps, clock)
        self._total_told = False

    def begin(self, levels: int, seeds: int) -> None:
        """Tell how many runs there will be; the time of a step is not known before the first ones were taken."""
        seeds_each = f"{counted(seeds, 'seed')}{' each' if seeds > 1 else ''}"
        line = f"{len(self._runs)} runs: {counted(levels, 'level')}, {seeds_each}"
        known = f", at most {self._asked} steps" if self._asked is not None else _NO_STEPS
        print(line + known, flush=True)

    def show(self, run: Run) -> None:
        """In a terminal: how far the run is whose turn it is. Everywhere, once: how long all runs will take."""
        self._times.look(run)
        self._tell_total()
        if not self._alive or time.monotonic() - self._shown < _SECONDS:
            return
        self._shown = time.monotonic()
        columns = shutil.get_terminal_size().columns
        print(_CLEAR + self.line(run)[: columns - 1], end="", flush=True)

    def line(self, run: Run) -> str:
        """The line for a run that trains: which of how many runs, and its newest figures."""
        of = "" if self._steps is None else f" of {self._steps}"
        loss, ms = newest_figures(run)
        figures = [f"loss {loss}"] * bool(loss) + [f"{ms} ms a step"] * bool(ms)
        parts = [f"{self._ended} of {len(self._runs)} runs", *self._left()]
        return ", ".join([*parts, f"{run.level} seed {run.seed}", f"step {run.steps}{of}", *figures])

    def end(self, run: Run) -> None:
        """Tell how the run went; why one was refused comes once, and whole."""
        self._ended += 1
        self._times.end(run)
        self._tell_total()
        if self._steps is None and run.error is None:
            self._steps = run.steps  # the other runs are expected to take as many
        self.close()
        if not run.refused:
            print("; ".join([progress_line(run, self._asked), *self._left()]), flush=True)

    def _left(self) -> list[str]:
        """The time left, in words; empty where it is not known, or nothing is left."""
        left = self._times.left() if self._ended < len(self._runs) else None
        return [] if left is None else [f"{about(left)} left"]

    def _tell_total(self) -> None:
        total = self._times.total() if self._ended < len(self._runs) and not self._total_told else None
        if total is None:
            return
        self._total_told = True
        only = self._times.only_level
        condition = "" if only is None else f", if the other levels take as long as {only}"
        self.close()
        print(f"{len(self._runs)} runs, {about(total)}{condition}", flush=True)

    def close(self) -> None:
        """Take the terminal's line away."""
        if self._alive:
            print(_CLEAR, end="", flush=True)

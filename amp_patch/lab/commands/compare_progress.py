"""Printed progress of a comparison, with its expected time.

The first line has the number of runs, a later one their expected time. A line is printed when a run ends. A terminal
also shows a bar with the run that trains; other outputs get a line every half minute. If the number of steps is
unknown, a line after ten steps has the time of a step, and a value for `--steps` with the time of all runs.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable

from amp_patch.lab.commands.compare_time import RunTimes
from amp_patch.lab.comparison.plan import newest_figures, progress_line
from amp_patch.lab.recording.run import Run
from amp_patch.lab.wording import about, counted, short

_SECONDS = 0.2  # between two updates of the terminal's line
_SILENT = 25.0  # seconds between lines without a terminal; an update can be a few seconds late
_BAR = 16  # letters
_NO_STEPS = "; how long they take without --steps is known when the first has ended"
_FIRST = 10  # steps of the first run before an estimate
_LONG = 600.0  # seconds: for a longer comparison, a smaller number of steps is suggested
_FEWER = (1000, 300, 100, 30)  # numbers of steps to suggest: the largest with which all runs take less than `_LONG`
_CLEAR = "\r\x1b[K"


class Progress:
    """Printer of a comparison's progress to sys.stdout. It stops if a write fails, because the reader closed the pipe.

    Args:
        runs: the runs to make; the list may grow.
        steps: the number of steps after which each run is ended; None if the script decides.
        finished: the number of runs that earlier calls of `compare` in this folder finished.
        tells_time: whether to print the expected times, of a step and of all runs.
        clock: returns seconds.
    """

    def __init__(
        self,
        runs: list[Run],
        steps: int | None,
        *,
        finished: int = 0,
        tells_time: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runs = runs
        self._asked = self._steps = steps
        self._finished = finished
        self._ended = 0
        self._clock = clock
        self._begun = self._said = clock()
        self._shown = 0.0
        self._alive = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._is_gone = False
        self._errors: dict[str, str] = {}  # an error -> the first run that had it
        self._times = RunTimes(runs, steps, clock)
        self._total_told = self._rate_told = not tells_time

    def begin(self, levels: int, seeds: int) -> None:
        """Print the number of runs; their time is unknown before the first steps."""
        seeds_each = f"{counted(seeds, 'seed')}{' each' if seeds > 1 else ''}"
        there = f", of which {self._finished} have finished" if self._finished else ""
        line = f"{len(self._runs) + self._finished} runs: {counted(levels, 'level')}, {seeds_each}{there}"
        known = f", at most {self._asked} steps" if self._asked is not None else _NO_STEPS
        self.say(line + (known if self._runs else ""))

    def show(self, run: Run) -> None:
        """In a terminal, update the line of `run`, which trains now; elsewhere, print that line every half minute.

        As soon as the time of all runs can be estimated, it is printed once.
        """
        self._times.look(run)
        self._tell_rate(run)
        self._tell_total()
        if not self._alive and self._clock() - self._said >= _SILENT:
            self.say(self.line(run))
        if not self._alive or time.monotonic() - self._shown < _SECONDS:
            return
        self._shown = time.monotonic()
        columns = shutil.get_terminal_size().columns
        self._put_words(_CLEAR + self.line(run)[: columns - 1], end="")

    def overdue(self, run: Run) -> str | None:
        """Return `RunTimes.overdue` of a run that trains."""
        return self._times.overdue(run)

    def line(self, run: Run) -> str:
        """Return the line of a run that trains: the bar, its number among the runs, and its newest figures."""
        of = "" if self._steps is None else f" of {self._steps}"
        loss, ms = newest_figures(run)
        figures = [f"loss {loss}"] * bool(loss) + [f"{ms} ms a step"] * bool(ms)
        done = f"{self._finished + self._ended} of {self._finished + len(self._runs)} runs"
        minutes, seconds = divmod(int(self._clock() - self._begun), 60)
        parts = [f"{self._bar()} {minutes}:{seconds:02}", *self._left(), done]
        return ", ".join([*parts, f"{run.level} seed {run.seed}", f"step {run.steps}{of}", *figures])

    def end(self, run: Run) -> None:
        """Print the loss and time of an ended run, or its error.

        If an earlier run had the same error, print "failed as O1 seed 0 did". If the run was refused (`Run.refused`),
        print nothing: the caller prints the reason.
        """
        self._ended += 1
        self._times.end(run)
        self._tell_total()
        if self._steps is None and run.error is None:
            self._steps = run.steps  # the other runs are expected to take as many steps
        if run.refused:
            return
        name, first = f"{run.level} seed {run.seed}", ""
        if run.error is not None:
            first = self._errors.get(run.error, "")
            self._errors.setdefault(run.error, name)
        line = f"{name}: failed as {first} did" if first else progress_line(run, self._asked)
        self.say("; ".join([line, *self._left()]))

    def say(self, line: str) -> None:
        """Print a line that stays. In a terminal it replaces the line of the run that trains."""
        self.close()
        self._put_words(line)

    def close(self) -> None:
        """Clear the terminal's line."""
        if self._alive:
            self._put_words(_CLEAR, end="")

    def _left(self) -> list[str]:
        """Return a list with the remaining time of all runs in words; an empty list if it is unknown, or zero."""
        left = self._times.left() if self._ended < len(self._runs) else None
        return [] if left is None else [f"{about(left)} left"]

    def _bar(self) -> str:
        """Return "[####............]": the elapsed share of the expected time; if unknown, the share of ended runs."""
        spent, left = self._clock() - self._begun, self._times.left()
        share = self._ended / max(1, len(self._runs)) if left is None else spent / (spent + left) if spent else 0.0
        return f"[{'#' * int(_BAR * share):.<{_BAR}}]"

    def _tell_rate(self, run: Run) -> None:
        """If it is unknown how many steps a run takes, print once the time of a step. Otherwise print nothing.

        The line also has a value for `--steps`, with the expected time of all runs.
        """
        if self._rate_told or self._steps is not None or run.steps < _FIRST:
            return
        a_step = self._times.seconds_a_step(run)
        if a_step is None:
            return
        self._rate_told = True
        line = f"{run.level} takes {short(1000 * a_step)} ms a step"
        self.say(f"{line}; {fewer}" if (fewer := self._fewer(len(self._runs))) else line)

    def _tell_total(self) -> None:
        total = self._times.total() if self._ended < len(self._runs) and not self._total_told else None
        if total is None:
            return
        self._total_told = True
        only = self._times.only_level
        condition = "" if only is None else f", if the other levels take as long as {only}"
        fewer = self._fewer(len(self._runs)) if self._asked is None and total > _LONG else ""
        self.say(f"{counted(len(self._runs), 'run')}, {about(total)}{condition}{f'; {fewer}' if fewer else ''}")

    def _fewer(self, runs: int) -> str:
        """Return "--steps 300 would take about 6 minutes for all 15 runs"; "" if the time of a step is unknown."""
        times = [(steps, self._times.total_of(steps)) for steps in _FEWER]
        known = [(steps, total) for steps, total in times if total is not None]
        if not known:
            return ""
        steps, total = next(((steps, total) for steps, total in known if total < _LONG), known[-1])
        return f"--steps {steps} would take {about(total)} for {'all ' * (runs > 1)}{counted(runs, 'run')}"

    def _put_words(self, words: str, end: str = "\n") -> None:
        self._said = self._clock()
        if self._is_gone:
            return
        try:
            print(words, end=end, flush=True)
        except OSError:
            self._is_gone = True

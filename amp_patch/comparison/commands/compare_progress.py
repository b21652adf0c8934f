"""Printed progress of a comparison.

The first line has the number of runs, and a line is printed when a run ends. A terminal also shows a bar with the run
that trains; other outputs get that line every half minute.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable

from amp_patch.comparison.plan import newest_figures, progress_line
from amp_patch.diagnose.recording.run import Run
from amp_patch.diagnose.wording import counted

_SECONDS = 0.2  # between two updates of the terminal's line
_SILENT = 25.0  # seconds between lines without a terminal; an update can be a few seconds late
_BAR = 16  # letters
_CLEAR = "\r\x1b[K"


class Progress:
    """Printer of a comparison's progress to sys.stdout. It stops if a write fails, because the reader closed the pipe.

    Args:
        runs: the runs to make; the list may grow.
        steps: the number of steps after which each run is ended; None if the script decides.
        finished: the number of runs that earlier calls of `compare` in this folder finished.
        clock: returns seconds.
    """

    def __init__(
        self, runs: list[Run], steps: int | None, *, finished: int = 0, clock: Callable[[], float] = time.monotonic
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

    def begin(self, levels: int, seeds: int) -> None:
        """Print the number of runs."""
        seeds_each = f"{counted(seeds, 'seed')}{' each' if seeds > 1 else ''}"
        there = f", of which {self._finished} have finished" if self._finished else ""
        most = f", at most {self._asked} steps" if self._asked is not None and self._runs else ""
        self.say(f"{len(self._runs) + self._finished} runs: {counted(levels, 'level')}, {seeds_each}{there}{most}")

    def show(self, run: Run) -> None:
        """In a terminal, update the line of `run`, which trains now; elsewhere, print that line every half minute."""
        if not self._alive and self._clock() - self._said >= _SILENT:
            self.say(self.line(run))
        if not self._alive or time.monotonic() - self._shown < _SECONDS:
            return
        self._shown = time.monotonic()
        columns = shutil.get_terminal_size().columns
        self._put_words(_CLEAR + self.line(run)[: columns - 1], end="")

    def line(self, run: Run) -> str:
        """Return the line of a run that trains: the bar, its number among the runs, and its newest figures."""
        of = "" if self._steps is None else f" of {self._steps}"
        loss, ms = newest_figures(run)
        figures = [f"loss {loss}"] * bool(loss) + [f"{ms} ms a step"] * bool(ms)
        done = f"{self._finished + self._ended} of {self._finished + len(self._runs)} runs"
        minutes, seconds = divmod(int(self._clock() - self._begun), 60)
        parts = [f"{self._bar(run)} {minutes}:{seconds:02}", done, run.name]
        return ", ".join([*parts, f"step {run.steps}{of}", *figures])

    def end(self, run: Run) -> None:
        """Print the loss and time of an ended run, or its error.

        If an earlier run had the same error, print "failed as O1 seed 0 did". If the run was refused (`Run.refused`),
        print nothing: the caller prints the reason.
        """
        self._ended += 1
        if self._steps is None and run.error is None:
            self._steps = run.steps  # the other runs are expected to take as many steps
        if run.refused:
            return
        name, first = run.name, ""
        if run.error is not None:
            first = self._errors.get(run.error, "")
            self._errors.setdefault(run.error, name)
        self.say(f"{name}: failed as {first} did" if first else progress_line(run, self._asked))

    def say(self, line: str) -> None:
        """Print a line that stays. In a terminal it replaces the line of the run that trains."""
        self.close()
        self._put_words(line)

    def close(self) -> None:
        """Clear the terminal's line."""
        if self._alive:
            self._put_words(_CLEAR, end="")

    def _bar(self, run: Run) -> str:
        """Return "[####............]": the share of the runs that have ended, with the steps of `run`."""
        begun = min(1.0, run.steps / self._steps) if self._steps else 0.0
        share = min(1.0, (self._ended + begun) / max(1, len(self._runs)))
        return f"[{'#' * int(_BAR * share):.<{_BAR}}]"

    def _put_words(self, words: str, end: str = "\n") -> None:
        self._said = self._clock()
        if self._is_gone:
            return
        try:
            print(words, end=end, flush=True)
        except OSError:
            self._is_gone = True

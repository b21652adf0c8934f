"""How far a comparison is: a line for each run that has ended, and in a terminal one for the run that trains."""

from __future__ import annotations

import shutil
import sys
import time

from amp_patch.lab.comparison.plan import newest_figures, progress_line
from amp_patch.lab.recording.run import Run

_SECONDS = 0.2  # between two looks of the terminal's line
_CLEAR = "\r\x1b[K"


class Progress:
    """Prints to sys.stdout.

    Args:
        runs: all of the comparison; the list may grow.
        steps: of a run, if that is known.
    """

    def __init__(self, runs: list[Run], steps: int | None) -> None:
        self._runs = runs
        self._asked = self._steps = steps
        self._ended = 0
        self._shown = 0.0
        self._alive = sys.stdout.isatty()

    def show(self, run: Run) -> None:
        """In a terminal: how far the run is whose turn it is."""
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
        parts = [f"{self._ended} of {len(self._runs)} runs", f"{run.level} seed {run.seed}", f"step {run.steps}{of}"]
        return ", ".join([*parts, *figures])

    def end(self, run: Run) -> None:
        """Tell how the run went; why one was refused comes once, and whole."""
        self._ended += 1
        if self._steps is None and run.error is None:
            self._steps = run.steps  # the other runs are expected to take as many
        self.close()
        if not run.refused:
            print(progress_line(run, self._asked), flush=True)

    def close(self) -> None:
        """Take the terminal's line away."""
        if self._alive:
            print(_CLEAR, end="", flush=True)

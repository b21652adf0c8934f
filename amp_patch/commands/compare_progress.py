"""How far a comparison is: a table that is alive in a terminal, a line per finished run elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from amp_patch.comparison.plan import newest_figures, progress_line
from amp_patch.recording.run import Run

_COLOURS = {"waiting": "dim", "running": "bold", "done": "green", "failed": "red"}


class Progress:
    """The state of each run, which `begin` and `end` move; the run's own lists tell how far it is."""

    def __init__(self, console: Console, runs: list[Run], steps: int | None) -> None:
        self.console = console
        self.runs = runs
        self.asked = self.steps = steps
        self.states = ["waiting"] * len(runs)
        self.live = console.is_terminal

    @contextmanager
    def shown(self) -> Iterator[Progress]:
        if not self.live:
            yield self
            return
        with Live(get_renderable=self.table, console=self.console, refresh_per_second=4):
            yield self

    def begin(self, index: int) -> None:
        self.states[index] = "running"

    def end(self, index: int) -> None:
        run = self.runs[index]
        self.states[index] = "done" if run.error is None else "failed"
        if self.steps is None and run.error is None:
            self.steps = run.steps  # what the others can be expected to take
        if not self.live and not run.refused:  # why that is comes once, and whole
            self.console.print(Text(progress_line(run, self.asked)), soft_wrap=True)

    def grow(self, rest: list[Run]) -> None:
        """Let `rest` be what follows the first run."""
        self.runs[1:] = rest
        self.states[1:] = ["waiting"] * len(rest)

    def table(self) -> Table:
        """The rows around the run that is under way, as many as the terminal has room for."""
        table = Table("level", "seed", "step", "loss", "ms a step", "state", box=None, header_style="dim")
        for column in table.columns[1:5]:
            column.justify = "right"
        room = max(1, self.console.height - 2)
        current = next((i for i, state in enumerate(self.states) if state in ("waiting", "running")), len(self.runs))
        first = max(0, min(current - room // 2, len(self.runs) - room))
        for run, state in list(zip(self.runs, self.states, strict=True))[first : first + room]:
            words = state if run.error is None or run.refused else f"{state}: {run.error}"
            cells = [run.level, str(run.seed), self._step(run), *newest_figures(run)]
            last = Text(words, style=_COLOURS[state], no_wrap=True, overflow="ellipsis")
            table.add_row(*cells, last)
        return table

    def _step(self, run: Run) -> str:
        return f"{run.steps}/{self.steps}" if self.steps is not None else str(run.steps)

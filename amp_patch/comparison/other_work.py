"""Measure how much of the cores' time other processes took while a training ran: they make its speed look too low."""

from __future__ import annotations

import os
import time

from amp_patch.comparison.processes import busy_seconds, cpu_seconds

_SHORTEST = 0.5  # seconds between two readings, which the system gives in hundredths of a second
_FULL = 0.9  # share of the cores' time; below it, other work ran on idle cores and took nothing from the training
_SHARE = 0.1  # if other work crowded the cores for at least this share of the time, `words` says so
_LEAST = 0.1  # other work on fewer cores than this does not count


class OtherWork:
    """Readings of the cores' time while trainings run: `watch` a process, `read` often, `watch` the next one.

    Args:
        whole: the readings of all runs of a comparison, to which those of this one run are added too.
    """

    def __init__(self, whole: OtherWork | None = None) -> None:
        self._whole = whole
        self.cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._pid = 0
        self._last: tuple[float, float, float] | None = None
        self._seconds = self._taken = self._crowded = 0.0

    def watch(self, pid: int) -> None:
        """Count the process `pid` and its children as the training from now on; all other processes are other work."""
        self._pid = pid
        self._last = self._reading()

    def read(self) -> None:
        """Add the time since the last reading, unless that was less than `_SHORTEST` ago."""
        if self._last is None or time.monotonic() - self._last[0] < _SHORTEST:
            return
        now = self._reading()
        if now is not None:
            seconds, busy, own = (after - before for before, after in zip(self._last, now, strict=True))
            self.add(seconds, busy, own)
            self._last = now

    def add(self, seconds: float, busy: float, own: float) -> None:
        """Add a period of `seconds`: the cores together worked `busy` seconds, `own` of them for the training."""
        other = max(0.0, busy - own)
        self._seconds += seconds
        self._taken += other
        if busy > _FULL * self.cores * seconds and other > _LEAST * seconds:
            self._crowded += seconds
        if self._whole is not None:
            self._whole.add(seconds, busy, own)

    @property
    def share(self) -> float:
        """The share of all cores that other work took; 0 if it took little or could not be measured."""
        if not self._seconds or self._crowded < _SHARE * self._seconds:
            return 0.0
        return self._taken / self._seconds / self.cores

    def words(self) -> str | None:
        """Return a warning about the measured speeds; None if other work took little or could not be measured."""
        if not self.share:
            return None
        cores = f"{self.cores} cores" if self.cores > 1 else "the one core"
        return f"other work took {self.share * self.cores:.1f} of {cores} while it ran"

    def _reading(self) -> tuple[float, float, float] | None:
        busy, own = busy_seconds(), cpu_seconds(self._pid)
        return None if busy is None or own is None else (time.monotonic(), busy, own)

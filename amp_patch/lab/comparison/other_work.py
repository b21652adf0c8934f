"""How much of the cores other work took while a training ran."""

from __future__ import annotations

import os
import time

from amp_patch.lab.comparison.processes import busy_seconds, cpu_seconds

_SHORTEST = 0.5  # seconds between two readings: the system counts in hundredths
_FULL = 0.9  # of the cores' time: below it, other work ran on idle cores and took nothing from the training
_SHARE = 0.1  # of the time that the cores were full with other work among it: from here on `words` says so
_LEAST = 0.1  # cores that other work must have to count


class OtherWork:
    """Takes readings while trainings run: `watch` one, `read` as often as you like, and `watch` the next."""

    def __init__(self) -> None:
        self.cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._pid = 0
        self._last: tuple[float, float, float] | None = None
        self._seconds = self._taken = self._crowded = 0.0

    def watch(self, pid: int) -> None:
        """From now on it is this process that trains, with its children."""
        self._pid = pid
        self._last = self._reading()

    def read(self) -> None:
        """Add up what there was since the last reading, if that is a while ago."""
        if self._last is None or time.monotonic() - self._last[0] < _SHORTEST:
            return
        now = self._reading()
        if now is not None:
            seconds, busy, own = (after - before for before, after in zip(self._last, now, strict=True))
            self.add(seconds, busy, own)
            self._last = now

    def add(self, seconds: float, busy: float, own: float) -> None:
        """In so many seconds the cores worked `busy` seconds, `own` of them for the training."""
        other = max(0.0, busy - own)
        self._seconds += seconds
        self._taken += other
        if busy > _FULL * self.cores * seconds and other > _LEAST * seconds:
            self._crowded += seconds

    def words(self) -> str | None:
        """What the reader of the speeds should know; None if nothing, or if nothing tells."""
        if not self._seconds or self._crowded < _SHARE * self._seconds:
            return None
        cores = f"{self.cores} cores" if self.cores > 1 else "the one core"
        return f"other work took {self._taken / self._seconds:.1f} of {cores} while it ran"

    def _reading(self) -> tuple[float, float, float] | None:
        busy, own = busy_seconds(), cpu_seconds(self._pid)
        return None if busy is None or own is None else (time.monotonic(), busy, own)

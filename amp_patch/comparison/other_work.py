"""Measure how much of the cores' time other processes took while a training ran: they make its speed look too low."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

_SHORTEST = 0.5  # seconds between two readings, which the system gives in hundredths of a second
_FULL = 0.9  # share of the cores' time; below it, other work ran on idle cores and took nothing from the training
_SHARE = 0.1  # if other work crowded the cores for at least this share of the time, `words` says so
_PROC = Path("/proc")
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


def tree(pid: int) -> list[int]:
    """List the process and all its descendants; without /proc the process alone."""
    found = [pid]
    for each in found:  # the loop appends to `found`
        with suppress(OSError):
            for thread in (_PROC / str(each) / "task").iterdir():
                found += map(int, (thread / "children").read_text().split())
    return found


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU seconds of `pid` and its descendants, ended ones included.

    None without /proc, or if `pid` has ended.
    """
    ticks = 0
    for each in tree(pid):
        try:
            # Fields 14 to 17 of proc(5): utime, stime, cutime, cstime. Split at the last bracket, since
            # the name of a process may contain blanks and brackets.
            fields = (_PROC / str(each) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            if each == pid:
                return None
            continue
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float | None:
    """Return the seconds that the cores of this process's affinity have worked since boot, in sum over the cores.

    Work for any process counts. None without /proc.
    """
    try:
        lines = (_PROC / "stat").read_text().splitlines()
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    except (OSError, AttributeError):
        return None
    # Fields: user, nice, system, idle, iowait, irq, softirq, steal. Stolen time counts as busy,
    # since no process of this machine could use it.
    times = [list(map(int, line.split()[1:9])) for line in lines if line.split()[:1] and line.split()[0] in cores]
    return sum(sum(each) - each[3] - each[4] for each in times) / os.sysconf("SC_CLK_TCK") if times else None

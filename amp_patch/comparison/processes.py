"""Figures of processes from Linux' /proc: child processes and CPU time."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")


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

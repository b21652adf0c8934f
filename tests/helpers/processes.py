"""Functions that find processes of a test and wait for their end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
SECONDS = 90.0  # until a test gives up: the machine may have other work


def lives(pid: int) -> bool:
    """Tell whether the process runs; False for a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with suppress(OSError):
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return not _PROC.is_dir()


def in_folder(folder: Path) -> list[int]:
    """Return the processes whose working directory is `folder` (Linux)."""
    found = []
    for entry in _PROC.iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and (entry / "cwd").readlink() == folder and lives(int(entry.name)):
                found.append(int(entry.name))
    return found


def described(pid: int) -> str:
    """The command line, state and parent of a process, for messages."""
    with suppress(OSError):
        line = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        state = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return f"{pid} ({state[0]}, of {state[1]}): {line[:200]}"
    return f"{pid}: gone"


def wait_until(
    happens: Callable[[], object], seconds: float = SECONDS, instead: Callable[[], str] = lambda: "it has not happened"
) -> None:
    """Wait; `instead` says what is the case when the time is over."""
    until = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < until, f"{instead()}, in {seconds:g} s"
        time.sleep(0.05)


def wait_until_left(folder: Path) -> None:
    """Wait until no process has this working directory."""
    wait_until(lambda: not in_folder(folder), instead=lambda: f"left: {'; '.join(map(described, in_folder(folder)))}")

"""A guard process, which ends the processes that its parent has started if the parent ends before them.

The parent may end by any signal, kill -9 and a closed terminal included. The guard runs this file as a script, and
imports neither torch nor amp_patch. It reads from a pipe, whose other end closes when the parent ends. The guard then
sends SIGTERM to the watched processes and process groups, and SIGKILL two seconds later. On Linux it also finds
descendants that have left their group, by a variable in their environment.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress

_VARIABLE = "AMP_PATCH_GUARD"
_RELEASED = "released"
_SECONDS = 2.0  # between SIGTERM and SIGKILL, and after SIGKILL
_POLL = 0.02


class Guard:
    """A running guard process. Without process groups (Windows) it does nothing.

    Attributes:
        environment: variables that the caller must add to the environment of the watched processes.
    """

    def __init__(self) -> None:
        mark = secrets.token_hex(16)
        self.environment = {_VARIABLE: mark}
        self._process: subprocess.Popen[bytes] | None = None
        if os.name != "posix":
            return
        # A cluster's scheduler may signal all processes of a job, but the guard must outlive this process. The guard
        # inherits the signals that are blocked here, and ends when the pipe closes.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, mark],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # If this process is itself watched by a guard, its environment has that guard's mark. Without this
                # filter the outer guard would end the guard that is started here.
                env={name: value for name, value in os.environ.items() if name != _VARIABLE},
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def watch(self, target: int) -> None:
        """Watch the process with the ID `target`; if it is negative, the process group -`target`."""
        self._say(str(target))

    def release(self) -> None:
        """Tell the guard that the watched processes have ended, and end the guard."""
        self._say(_RELEASED)
        self.end()

    def end(self) -> None:
        """Close the pipe to the guard, which then ends the watched processes, unless `release` was called; no wait."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def join(self) -> None:
        """Wait until the guard has ended the watched processes and itself: a few seconds at most."""
        if self._process is not None:
            self.end()
            self._process.wait()

    def _say(self, word: str) -> None:
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(OSError):  # the guard was killed: a broken pipe
                self._process.stdin.write(f"{word}\n".encode())
                self._process.stdin.flush()


def _main(mark: str) -> None:
    words = sys.stdin.read().split()
    if _RELEASED not in words:
        _end_all(mark.encode(), [int(each) for each in words])


def _end_all(mark: bytes, watched: list[int]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        signalled: set[int] = set()
        until = time.monotonic() + _SECONDS
        while left := {each for each in watched if _signalled(each, 0)} | _marked(mark):
            for each in left - signalled:
                _signalled(each, how)
            signalled |= left
            if time.monotonic() > until:
                break
            time.sleep(_POLL)


def _signalled(target: int, how: int) -> bool:
    """Send the signal `how` (0 sends nothing) to a process or group; return whether it exists."""
    try:
        os.kill(target, how)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _marked(mark: bytes) -> set[int]:
    """Return the IDs of the processes that have the mark in their environment."""
    found = set()
    with suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError), open(f"/proc/{name}/environ", "rb") as environment:
                if mark in environment.read():
                    found.add(int(name))
    return found


if __name__ == "__main__":
    _main(sys.argv[1])

"""A process beside ours that ends what ours has started, should ours end first: by a signal, kill -9 or a terminal.

It is this file, run by itself, and imports neither torch nor amp_patch. It reads from a pipe of which ours holds the
other end: whatever ends us closes that. Then all that it watches, and all that was started from there, is ended by
SIGTERM, and by SIGKILL two seconds later. Processes that have left their group and parents are known by a variable of
their environment where the system tells of that (Linux).
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
    """Begins to wait when it is made; where there are no process groups (Windows) it does nothing.

    Attributes:
        environment: of the processes that are to be watched, with what else they have.
    """

    def __init__(self) -> None:
        mark = secrets.token_hex(16)
        self.environment = {_VARIABLE: mark}
        self._process: subprocess.Popen[bytes] | None = None
        if os.name != "posix":
            return
        # A scheduler signals the guard too, which must outlive this process: the guard inherits the blocked signals,
        # and ends when the pipe does.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, mark],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Without the mark of an outer guard, which would end this one.
                env={name: value for name, value in os.environ.items() if name != _VARIABLE},
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def watch(self, target: int) -> None:
        """Take the process of that number under guard; of a negative one its group."""
        self._say(str(target))

    def release(self) -> None:
        """What was watched has ended."""
        self._say(_RELEASED)
        self.end()

    def end(self) -> None:
        """End what is watched, unless it was released; `join` waits for that."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def join(self) -> None:
        """Wait for the end of the guard, some seconds at most: it has ended what it watched then."""
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
    """Send the signal; whether the process or group exists. Signal 0 only checks."""
    try:
        os.kill(target, how)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _marked(mark: bytes) -> set[int]:
    """The processes with the mark in their environment."""
    found = set()
    with suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError), open(f"/proc/{name}/environ", "rb") as environment:
                if mark in environment.read():
                    found.add(int(name))
    return found


if __name__ == "__main__":
    _main(sys.argv[1])

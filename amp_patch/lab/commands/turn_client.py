"""The turns of a compared run: its process trains during its turn, and waits during the turns of other runs.

turn_scheduler.py decides which process trains, and has a socket to each. Only `between_steps`, which the recorder calls
after flushing its sinks, hands a turn on. The end of a process ends its turn. A process that dies, forks or executes
another program therefore blocks no other run.

A script that writes a file, such as its best weights or its last checkpoint, may read the file back. All levels of a
seed share one working directory, so another level could overwrite the file in between. Therefore a process that is
about to make its first write keeps its turn until it ends, and the other runs wait.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from amp_patch.lab.commands.announced_writes import announce
from amp_patch.support.patches import Patches

TURN, LAST = b".", b"!"  # bytes from the scheduler: train for a while, or to your end
_SECONDS = 0.5  # of a turn; if a step takes longer, the turn is one step

# Bound at import: `run --device cpu` replaces torch's function by one that returns True.
_has_cuda = torch.cuda.is_initialized

_NO_FILES = ("/dev/", "/proc/", "/sys/")
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


class TurnClient:
    """The turns of this process. In its `with` block, a write to a file or a started process keeps the turn for good.

    Args:
        channel: the file descriptor of the socket to the scheduler.
        own: the path of this run's record, which no other run writes.
        native: returns whether the script uses torch's mixed precision.
        steps: returns the number of steps so far.

    Attributes:
        kept_for: the reason why the process keeps its turn until it ends, in words; None while it hands turns on.
    """

    def __init__(self, channel: int, own: str, native: Callable[[], bool], steps: Callable[[], int]) -> None:
        os.set_inheritable(channel, False)  # exec closes it: an executed program keeps the turn
        self.kept_for: str | None = None
        self._kept_at = 0
        self._native = native
        self._steps = steps
        self._process = os.getpid()
        self._socket = socket.socket(fileno=channel)
        self._inode = os.fstat(channel).st_ino
        self._lock = threading.RLock()  # held during a wait, in which other threads must not write
        self._begun = time.monotonic()
        self._waits = False  # whether the turn is handed on and the next has not begun
        self._is_last = False  # whether the turn lasts until the process ends
        caches = [os.path.expanduser("~/.cache"), *(os.environ[name] for name in _CACHES if os.environ.get(name))]
        self._ours = {os.path.abspath(path) for path in (own, *caches)}
        self._patches = Patches()

    def __enter__(self) -> TurnClient:
        announce(self._patches, self.write_begins, self.keep, self.temporary_made)
        return self

    def __exit__(self, *_: Any) -> None:
        self._patches.remove()

    def between_steps(self) -> None:
        """If this turn has lasted half a second, hand it on and wait for the next turn. Otherwise do nothing.

        A process that keeps its turn, or has its last turn, never waits here.

        Raises:
            SystemExit: `compare` has ended, so there are no more turns.
        """
        if self.kept_for is not None or self._is_last or time.monotonic() - self._begun < _SECONDS:
            return
        with self._lock:
            if not self._wait():
                raise SystemExit("compare, which started this process, has ended")

    def keep(self, why: str) -> None:
        """Keep the turn until this process ends. If the turn is handed on, wait for the next turn first."""
        if self.kept_for is not None or os.getpid() != self._process:
            return
        with self._lock:
            if self._waits:  # an interrupt has ended a wait before the turn came
                self._wait()
            if self.kept_for is None:
                self.kept_for, self._kept_at = why, self._steps()

    def note(self) -> str | None:
        """Return a sentence for the report if the turn is kept, and steps were made since `keep`; otherwise None."""
        if self.kept_for is None or self._steps() == self._kept_at:
            return None
        return f"the script {self.kept_for}: from the first time on it ran to its end, while the other levels waited"

    def write_begins(self, *paths: Any) -> None:
        """Call `keep` if another run may read or write one of `paths`, which are about to be written.

        This process then trains to its end, and the other runs wait.
        """
        if self.kept_for is None and os.getpid() == self._process and any(map(self._is_shared, paths)):
            self.keep("writes files")

    def temporary_made(self, path: Any) -> None:
        """Note a path that tempfile makes. Its name is unique, so a write to it does not keep the turn."""
        self._ours.add(os.path.abspath(os.fsdecode(path)))

    def _wait(self) -> bool:
        """Hand the turn on, and wait for the next turn. Return True, or False if `compare` has closed the socket.

        If the script itself has closed the socket, keep the turn, and return True.
        """
        try:
            if os.fstat(self._socket.fileno()).st_ino != self._inode:
                raise OSError("the script has closed the socket, and opened something else by its number")
            if not self._waits:
                state = {"native": self._native(), "cuda": _has_cuda()}
                self._waits = True
                self._socket.sendall(json.dumps(state).encode() + b"\n")
            given = self._socket.recv(1)
            self._is_last = given == LAST
        except OSError:
            self.kept_for, self._kept_at, given = "closes files that are not its own", self._steps(), b"."
        self._waits = False
        self._begun = time.monotonic()
        return bool(given)

    def _is_shared(self, path: Any) -> bool:
        """Return whether another run may read or write the file at `path`.

        The result is False for devices, caches, this run's own files, compiled code, and logs of TensorBoard.
        """
        if not isinstance(path, str | bytes | os.PathLike):
            return False  # a file descriptor, whose `open` was announced already
        text = os.path.abspath(os.fsdecode(path))
        parts = text.split(os.sep)
        return not (
            text.startswith(_NO_FILES)
            or any(text == each or text.startswith(each + os.sep) for each in self._ours)
            or any(part in ("__pycache__", ".triton") or part.startswith("torchinductor_") for part in parts)
            or parts[-1].startswith("events.out.tfevents.")  # TensorBoard puts the process id into the name
        )

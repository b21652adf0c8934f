"""The turns of a run that is compared: its process trains for a while at a time, and waits for the others meanwhile.

turn_scheduler.py decides which process trains, and has a socket to each. A turn is handed on in `between_steps` alone,
which the recorder calls when it has flushed its sinks. So a process that dies, forks, or becomes another program blocks
nobody: its turn is over when it ends.

A script that writes a file may read it back: its best weights, its last checkpoint. All levels of a seed run in one
folder, so before the first write the process takes its turn for good, and the others wait until it has ended.
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
_SECONDS = 0.5  # of a turn, or one step where that takes longer

# torch's function at import: `run --device cpu` replaces it by one that says True.
_has_cuda = torch.cuda.is_initialized

_NO_FILES = ("/dev/", "/proc/", "/sys/")
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


class TurnClient:
    """The turns of this process. In its `with` block a write to a file, and a process started, keep the turn for good.

    Args:
        channel: number of the socket to the process that gives the turns.
        own: a file that is no other run's.
        native: tells whether the script has mixed precision of torch's own.
        steps: tells how many steps it has taken.

    Attributes:
        kept_for: why the process takes no turns any more, in words; None while it does.
    """

    def __init__(self, channel: int, own: str, native: Callable[[], bool], steps: Callable[[], int]) -> None:
        os.set_inheritable(channel, False)  # closed by exec: a program in place of this process keeps the turn
        self.kept_for: str | None = None
        self._kept_at = 0
        self._native = native
        self._steps = steps
        self._process = os.getpid()
        self._socket = socket.socket(fileno=channel)
        self._inode = os.fstat(channel).st_ino
        self._lock = threading.RLock()  # held while this process waits: other threads must not write meanwhile
        self._begun = time.monotonic()
        self._waits = False  # whether the turn is handed on and no other has come
        self._is_last = False  # whether the turn lasts until the process ends
        caches = [os.path.expanduser("~/.cache"), *(os.environ[name] for name in _CACHES if os.environ.get(name))]
        self._ours = {os.path.abspath(path) for path in (own, *caches)}
        self._patches = Patches()

    def __enter__(self) -> TurnClient:
        announce(self._patches, self.write_begins, self.process_begins, self.temporary_made)
        return self

    def __exit__(self, *_: Any) -> None:
        self._patches.remove()

    def between_steps(self) -> None:
        """Hand the turn on, and wait for the next one, if this one was long enough.

        Raises:
            SystemExit: `compare` has ended, so no turn will come.
        """
        if self.kept_for is not None or self._is_last or time.monotonic() - self._begun < _SECONDS:
            return
        with self._lock:
            if not self._wait():
                raise SystemExit("compare, which started this process, has ended")

    def keep(self, why: str) -> None:
        """Let this process run until it ends, from now on or, should it wait, from its next turn on."""
        if self.kept_for is not None or os.getpid() != self._process:
            return
        with self._lock:
            if self._waits:  # true where an interrupt has ended the wait
                self._wait()
            if self.kept_for is None:
                self.kept_for, self._kept_at = why, self._steps()

    def note(self) -> str | None:
        """What the reader should know of the run, once it has ended."""
        if self.kept_for is None or self._steps() == self._kept_at:
            return None
        return f"the script {self.kept_for}: from the first time on it ran to its end, while the other levels waited"

    def write_begins(self, *paths: Any) -> None:
        """`keep`, if one of these paths can be another run's file too."""
        if self.kept_for is None and os.getpid() == self._process and any(map(self._is_shared, paths)):
            self.keep("writes files")

    def process_begins(self, why: str) -> None:
        """`keep`: the process may write files."""
        self.keep(why)

    def temporary_made(self, path: Any) -> None:
        """Do not `keep` for this path: a temporary file or folder has a name that no other process has."""
        self._ours.add(os.path.abspath(os.fsdecode(path)))

    def _wait(self) -> bool:
        """Hand the turn on, and wait for the next one; False where `compare` has closed the socket."""
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
        """Whether a file of this name may be one that the script reads in another run."""
        if not isinstance(path, str | bytes | os.PathLike):
            return False  # a file descriptor: `open` was announced
        text = os.path.abspath(os.fsdecode(path))
        parts = text.split(os.sep)
        return not (
            text.startswith(_NO_FILES)
            or any(text == each or text.startswith(each + os.sep) for each in self._ours)
            or any(part in ("__pycache__", ".triton") or part.startswith("torchinductor_") for part in parts)
            or parts[-1].startswith("events.out.tfevents.")  # TensorBoard's name has the process id in it
        )

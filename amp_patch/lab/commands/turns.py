"""The turns of a run that is compared: its process trains for a while at a time, and waits for the others meanwhile.

Whose turn it is, compare_turns.py decides; each process has a socket to it. A turn is handed on here alone, where the
recording hands on what it has, between two steps. So a process that dies, forks, or becomes another program blocks
nobody: the turn that it had is over when it ends.

A script that writes a file may read it back: its best weights, its last checkpoint. All levels of a seed run in one
folder, so before the first write the process takes its turn for good, and the others wait until it has ended. Seen are
writes by Python's and torch's functions, and safetensors'; processes that the script starts are taken for writers. An
audit hook would see a few more, but is called for each `id()` too, some 35 microseconds a step.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import io
import json
import multiprocessing.process
import os
import pathlib
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from amp_patch.lab.recording.run import Event
from amp_patch.support.patches import Patches

TURN, LAST = b".", b"!"  # what a process is told: train for a while, or to your end
_SECONDS = 0.5  # of a turn, or one step where that takes longer

# torch's own function: `run --device cpu` puts another in its place.
_has_cuda = torch.cuda.is_initialized

# Processes that these start write nothing that a training reads back.
_HARMLESS = ("torch", "triton", "platform", "ctypes", "uuid")
_NOT_HARMLESS = ("torch.multiprocessing", "torch.distributed")
_STARTERS = ("subprocess", "multiprocessing", "concurrent", "os", __name__)
_OF_TWO = ("rename", "replace", "link", "symlink")  # functions of os, of two paths
_NAMELESS = getattr(os, "O_TMPFILE", -1)
_NO_FILES = ("/dev/", "/proc/", "/sys/")
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


class Turns:
    """A sink of the recording: its `flush` hands the turn on and waits for the next, where this one was long enough.

    In its `with` block the functions that write files are replaced by those that call `keep` first.

    Args:
        channel: number of the socket to the process that gives the turns.
        own: a file that is no other run's.
        native: tells whether the script has mixed precision of torch's own.
        steps: tells how many steps it has taken.

    Attributes:
        kept_for: why the process takes no turns any more, in words; None while it does.
    """

    def __init__(self, channel: int, own: str, native: Callable[[], bool], steps: Callable[[], int]) -> None:
        os.set_inheritable(channel, False)  # a program that takes this process's place trains on in its turn
        self.kept_for: str | None = None
        self._kept_at = 0
        self._native = native
        self._steps = steps
        self._process = os.getpid()
        self._socket = socket.socket(fileno=channel)
        self._inode = os.fstat(channel).st_ino
        self._lock = threading.RLock()  # held while this process waits: a thread that would write waits too
        self._begun = time.monotonic()
        self._waits = self._over = False
        caches = [os.path.expanduser("~/.cache"), *(os.environ[name] for name in _CACHES if os.environ.get(name))]
        self._ours = {os.path.abspath(path) for path in (own, *caches)}
        self._patches = Patches()

    def __enter__(self) -> Turns:
        _announce(self._patches, self)
        return self

    def __exit__(self, *_: Any) -> None:
        self._patches.remove()

    def add(self, event: Event) -> None:
        self._over = self._over or event["event"] == "end"

    def flush(self) -> None:
        """
        Raises:
            SystemExit: nobody gives turns any more.
        """
        if self.kept_for is not None or self._over or time.monotonic() - self._begun < _SECONDS:
            return
        with self._lock:
            if not self._wait():
                raise SystemExit("compare, which started this process, has ended")

    def keep(self, why: str) -> None:
        """Let this process run until it ends, from now on or, should it wait, from its next turn on."""
        if self.kept_for is not None or os.getpid() != self._process:
            return
        with self._lock:
            if self._waits:  # on another thread, or behind an interrupt
                self._wait()
            if self.kept_for is None:
                self.kept_for, self._kept_at = why, self._steps()

    def note(self) -> str | None:
        """What the reader should know of the run, once it has ended."""
        if self.kept_for is None or self._steps() == self._kept_at:
            return None
        return f"the script {self.kept_for}: from the first time on it ran to its end, while the other levels waited"

    def writes(self, *paths: Any) -> None:
        """`keep`, if one of these can be another run's file too."""
        if self.kept_for is None and os.getpid() == self._process and any(map(self._is_shared, paths)):
            self.keep("writes files")

    def made(self, path: Any) -> None:
        """Take note of a temporary file or folder, which no other process has."""
        self._ours.add(os.path.abspath(os.fsdecode(path)))

    def _wait(self) -> bool:
        """Hand the turn on, and wait for the next; whether there is one."""
        try:
            if os.fstat(self._socket.fileno()).st_ino != self._inode:
                raise OSError("the script has closed the socket, and opened something else by its number")
            if not self._waits:
                state = {"native": self._native(), "cuda": _has_cuda()}
                self._waits = True
                self._socket.sendall(json.dumps(state).encode() + b"\n")
            given = self._socket.recv(1)
            self._over = given == LAST
        except OSError:
            self.kept_for, self._kept_at, given = "closes files that are not its own", self._steps(), b"."
        self._waits = False
        self._begun = time.monotonic()
        return bool(given)

    def _is_shared(self, path: Any) -> bool:
        """Whether a file of this name may be one that the script reads in another run."""
        if not isinstance(path, str | bytes | os.PathLike):
            return False  # a number: the file is open already
        text = os.path.abspath(os.fsdecode(path))
        parts = text.split(os.sep)
        return not (
            text.startswith(_NO_FILES)
            or any(text == each or text.startswith(each + os.sep) for each in self._ours)
            or any(part in ("__pycache__", ".triton") or part.startswith("torchinductor_") for part in parts)
            or parts[-1].startswith("events.out.tfevents.")  # TensorBoard's, which has the process's number in its name
        )


class _Announced:
    """Calls `before` with its own arguments, then `original`. No function: a class may have it as an attribute."""

    def __init__(self, original: Callable[..., Any], before: Callable[..., None]) -> None:
        functools.update_wrapper(self, original)
        self._original = original
        self._before = before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before(*args, **kwargs)
        return self._original(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        return _itself, (self._original,)  # a process that is started anew has what was there before


def _itself(value: Any) -> Any:
    return value


def _announce(patches: Patches, turns: Turns) -> None:
    """Have whatever writes files, or starts processes, tell `turns` first."""

    def announced(owner: Any, name: str, before: Callable[..., None]) -> None:
        patches.set(owner, name, _Announced(getattr(owner, name), before))

    def opens(file: Any = None, mode: str = "r", *_: Any, **__: Any) -> None:
        if isinstance(mode, str) and not set("wax+").isdisjoint(mode) and _caller() != "tempfile":
            turns.writes(file)

    def opens_by_flags(path: Any = None, flags: int = 0, *_: Any, **__: Any) -> None:
        if flags & _NAMELESS == _NAMELESS:
            return
        if _caller() == "tempfile":
            turns.made(path)
        elif flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
            turns.writes(path)

    def makes_folder(path: Any = None, *_: Any, **__: Any) -> None:
        if _caller() == "tempfile":
            turns.made(path)

    def first(path: Any = None, *_: Any, dir_fd: Any = None, **__: Any) -> None:
        if dir_fd is None:  # else the path is of that folder, and shutil.rmtree has told of it
            turns.writes(path)

    def second(_: Any = None, path: Any = None, *__: Any, **named: Any) -> None:
        turns.writes(path, *named.values())

    def both(*paths: Any, **named: Any) -> None:
        turns.writes(*paths[:2], *named.values())

    opened = _Announced(builtins.open, opens)
    patches.set(builtins, "open", opened)
    patches.set(io, "open", opened)
    announced(os, "open", opens_by_flags)
    announced(os, "mkdir", makes_folder)
    for name in ("remove", "unlink", "truncate"):
        announced(os, name, first)
    for name in _OF_TWO:
        announced(os, name, both)
    if (accessor := getattr(pathlib, "_NormalAccessor", None)) is not None:  # Python 3.10's paths have what was there
        patches.set(accessor, "open", opened)
        for name in ("mkdir", "unlink", *_OF_TWO):
            patches.set(accessor, name, getattr(os, name))
    announced(shutil, "rmtree", first)
    announced(sqlite3, "connect", first)
    announced(torch._C, "PyTorchFileWriter", first)  # torch.save's, in C++
    announced(torch.jit, "save", second)
    if importlib.util.find_spec("safetensors") is not None:
        import safetensors  # first: its modules take the function from it

        for module in (safetensors, *map(sys.modules.get, ("safetensors.torch", "safetensors.numpy"))):
            if module is not None:
                announced(module, "serialize_file", second)
    _announce_processes(patches, turns)


def _announce_processes(patches: Patches, turns: Turns) -> None:
    def starts(*_: Any, **__: Any) -> None:
        caller = _caller(*_STARTERS)
        if not _is_of(caller, _HARMLESS) or _is_of(caller, _NOT_HARMLESS):
            turns.keep("starts processes")

    def telling(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def start(self: Any, *args: Any, **kwargs: Any) -> Any:
            starts()
            return original(self, *args, **kwargs)

        return start

    patches.set(subprocess.Popen, "__init__", telling(subprocess.Popen.__init__))
    process = multiprocessing.process.BaseProcess
    patches.set(process, "start", telling(process.start))
    for name in ("system", "fork", "forkpty", "posix_spawn", "posix_spawnp", "execv", "execve"):
        if hasattr(os, name):
            patches.set(os, name, _Announced(getattr(os, name), starts))
    if torch.distributed.is_available():  # the port of its store is one for all levels
        join = torch.distributed.init_process_group
        joins = _Announced(join, lambda *_, **__: turns.keep("joins other processes"))
        patches.set(torch.distributed, "init_process_group", joins)


def _caller(*beyond: str) -> str:
    """The name of the module that called the announced function: the first that is none of `beyond`, nor ours."""
    frame = sys._getframe(1)
    while frame is not None and _is_of(frame.f_globals.get("__name__") or "", (__name__, *beyond)):
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else frame.f_globals.get("__name__") or ""


def _is_of(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == each or module.startswith(each + ".") for each in packages)

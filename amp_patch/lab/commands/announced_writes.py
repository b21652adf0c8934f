"""Callbacks before a script writes a file, or starts a process that may write one; turn_client.py needs them.

They are called for writes by functions of Python, torch and safetensors. An audit hook (`sys.addaudithook`) would see a
few more writes, but would cost about 35 microseconds a step, because Python also calls it for each `id()`.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import io
import multiprocessing.process
import os
import pathlib
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from amp_patch.support.patches import Patches
from amp_patch.support.scripts_line import frames

# Packages whose processes (compilers, probes) write no file that the training reads.
_HARMLESS = ("torch", "triton", "platform", "ctypes", "uuid")
_NOT_HARMLESS = ("torch.multiprocessing", "torch.distributed")
_STARTERS = ("subprocess", "multiprocessing", "concurrent", "os", __name__)
_OF_TWO = ("rename", "replace", "link", "symlink")  # functions of os that take two paths
_NAMELESS = getattr(os, "O_TMPFILE", -1)


class _Announced:
    """A function that calls `before` and then `original` with the same arguments.

    A class that stores it as an attribute does not make it a method, as with a builtin.
    """

    def __init__(self, original: Callable[..., Any], before: Callable[..., None]) -> None:
        functools.update_wrapper(self, original)
        self._original = original
        self._before = before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before(*args, **kwargs)
        return self._original(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        # Pickled for a spawned process. That process does not train in turns, so the original function is pickled.
        return _itself, (self._original,)


def _itself(value: Any) -> Any:
    return value


def announce(
    patches: Patches,
    on_write: Callable[..., None],
    on_process: Callable[[str], None],
    on_temporary: Callable[[Any], None],
) -> None:
    """Replace the functions that write files or start processes by ones that call back first.

    Args:
        patches: holds the replacements; removing it restores the originals.
        on_write: called with the paths that are about to be written, renamed or removed.
        on_process: called before a process is started, or this one joins a process group, with a phrase such as "starts
            processes".
        on_temporary: called instead of `on_write` with a path that `tempfile` is about to create.
    """

    def announced(owner: Any, name: str, before: Callable[..., None]) -> None:
        patches.set(owner, name, _Announced(getattr(owner, name), before))

    def opens(file: Any = None, mode: str = "r", *_: Any, **__: Any) -> None:
        if isinstance(mode, str) and not set("wax+").isdisjoint(mode) and _caller() != "tempfile":
            on_write(file)

    def opens_by_flags(path: Any = None, flags: int = 0, *_: Any, **__: Any) -> None:
        if flags & _NAMELESS == _NAMELESS:
            return
        if _caller() == "tempfile":
            on_temporary(path)
        elif flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
            on_write(path)

    def makes_folder(path: Any = None, *_: Any, **__: Any) -> None:
        if _caller() == "tempfile":
            on_temporary(path)

    def first(path: Any = None, *_: Any, dir_fd: Any = None, **__: Any) -> None:
        if dir_fd is None:  # a path relative to `dir_fd` comes from shutil.rmtree, whose call was announced already
            on_write(path)

    def second(_: Any = None, path: Any = None, *__: Any, **named: Any) -> None:
        on_write(path, *named.values())

    def both(*paths: Any, **named: Any) -> None:
        on_write(*paths[:2], *named.values())

    opened = _Announced(builtins.open, opens)
    patches.set(builtins, "open", opened)
    patches.set(io, "open", opened)
    announced(os, "open", opens_by_flags)
    announced(os, "mkdir", makes_folder)
    for name in ("remove", "unlink", "truncate"):
        announced(os, name, first)
    for name in _OF_TWO:
        announced(os, name, both)
    # pathlib of Python 3.10 calls the functions of `os` and `io` that it stored here at its import.
    if (accessor := getattr(pathlib, "_NormalAccessor", None)) is not None:
        patches.set(accessor, "open", opened)
        for name in ("mkdir", "unlink", *_OF_TWO):
            patches.set(accessor, name, getattr(os, name))
    announced(shutil, "rmtree", first)
    announced(sqlite3, "connect", first)
    announced(torch._C, "PyTorchFileWriter", first)  # torch.save writes with this C++ class
    announced(torch.jit, "save", second)
    if importlib.util.find_spec("safetensors") is not None:
        import safetensors  # patched here first: a submodule that is imported later binds the replacement

        for module in (safetensors, *map(sys.modules.get, ("safetensors.torch", "safetensors.numpy"))):
            if module is not None:
                announced(module, "serialize_file", second)
    _announce_processes(patches, on_process)


def _announce_processes(patches: Patches, on_process: Callable[[str], None]) -> None:
    def starts(*_: Any, **__: Any) -> None:
        caller = _caller(*_STARTERS)
        if not _is_of(caller, _HARMLESS) or _is_of(caller, _NOT_HARMLESS):
            on_process("starts processes")

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
    if torch.distributed.is_available():  # process groups of two levels would use the same port
        join = torch.distributed.init_process_group
        joins = _Announced(join, lambda *_, **__: on_process("joins other processes"))
        patches.set(torch.distributed, "init_process_group", joins)


def _caller(*beyond: str) -> str:
    """Return the name of the module that called: the innermost on the stack that is neither this nor in `beyond`.

    "" if there is none.
    """
    names = (frame.f_globals.get("__name__") or "" for frame in frames())
    return next((name for name in names if not _is_of(name, (__name__, *beyond))), "")


def _is_of(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == each or module.startswith(each + ".") for each in packages)

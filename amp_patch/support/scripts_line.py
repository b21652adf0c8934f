"""The line of user code that a warning or an error names."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_NOT_THE_USERS = ("torch", __name__.partition(".")[0])
INSTALLED = {"site-packages", "dist-packages"}  # the latter is Debian's name
_RUNNERS = ("runpy", "importlib", "contextlib")


def frames() -> Iterator[FrameType]:
    """Yield the frames of this thread, innermost first. The first one is the frame of the loop over the result."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def warn(text: str) -> None:
    """Give a warning that names the innermost line outside torch and amp_patch."""
    frame, level = sys._getframe(1), 2
    while _package(frame) in _NOT_THE_USERS and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def place(frame: FrameType, line: int) -> str | None:
    """Return "train.py, line 31", or None for code of an installed package, the interpreter or amp_patch."""
    path = frame.f_code.co_filename
    installed = not INSTALLED.isdisjoint(Path(path).parts)
    if installed or path.startswith(("<frozen", os.path.dirname(os.__file__) + os.sep)):
        return None
    return None if _package(frame) in (*_NOT_THE_USERS, *_RUNNERS) else f"{os.path.basename(path)}, line {line}"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def frames_of(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield (frame, line number) from the traceback of the first error in the chain of `error`, innermost last."""
    while error.__cause__ is not None:
        error = error.__cause__
    found = error.__traceback__
    while found is not None:
        yield found.tb_frame, found.tb_lineno
        found = found.tb_next


def raised_at(error: BaseException) -> str:
    """Return " (net.py, line 31)", the innermost line of `error` outside torch and amp_patch; "" if there is none."""
    lines = [(frame, line) for frame, line in frames_of(error) if _package(frame) not in _NOT_THE_USERS]
    return f" ({os.path.basename(lines[-1][0].f_code.co_filename)}, line {lines[-1][1]})" if lines else ""

"""Which line of the user's a warning or an error is about."""

from __future__ import annotations

import os
import sys
from types import FrameType

_NOT_THE_USERS = ("torch", __name__.partition(".")[0])
_RUNNERS = ("runpy", "importlib", "contextlib")


def stacklevel() -> int:
    """For `warnings.warn` in the caller: the level of the innermost function that is neither torch's nor ours."""
    frame, level = sys._getframe(1), 1
    while _package(frame) in _NOT_THE_USERS and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return level


def place(frame: FrameType, line: int) -> str | None:
    """ "train.py, line 31"; None where the frame's code is an installed package's, the interpreter's or ours."""
    path = frame.f_code.co_filename
    if "site-packages" in path or path.startswith(("<frozen", os.path.dirname(os.__file__) + os.sep)):
        return None
    return None if _package(frame) in (*_NOT_THE_USERS, *_RUNNERS) else f"{os.path.basename(path)}, line {line}"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]

"""Which line of the user's a warning, or an error, is about."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FrameType

_NOT_THE_USERS = ("torch", __name__.partition(".")[0])


def stacklevel() -> int:
    """For `warnings.warn` in the caller: the level of the innermost function that is neither torch's nor ours."""
    frame, level = sys._getframe(1), 1
    while str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_THE_USERS and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return level


def frames_of(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """The frames that the first of the errors behind `error` went through, and their lines; innermost last."""
    while error.__cause__ is not None:
        error = error.__cause__
    found = error.__traceback__
    while found is not None:
        yield found.tb_frame, found.tb_lineno
        found = found.tb_next


def raised_at(error: BaseException) -> str:
    """ " (net.py, line 31)": the innermost line behind `error` that is neither torch's nor ours; empty if none is."""
    named = ((frame, line, str(frame.f_globals.get("__name__")).partition(".")[0]) for frame, line in frames_of(error))
    lines = [(frame, line) for frame, line, package in named if package not in _NOT_THE_USERS]
    return f" ({os.path.basename(lines[-1][0].f_code.co_filename)}, line {lines[-1][1]})" if lines else ""

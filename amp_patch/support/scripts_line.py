"""Which line of the user's a warning is about."""

from __future__ import annotations

import sys

_NOT_THE_USERS = ("torch", __name__.partition(".")[0])


def stacklevel() -> int:
    """For `warnings.warn` in the caller: the level of the innermost function that is neither torch's nor ours."""
    frame, level = sys._getframe(1), 1
    while str(frame.f_globals.get("__name__")).partition(".")[0] in _NOT_THE_USERS and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return level

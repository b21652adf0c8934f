"""Detection of scripts that import amp_patch or Apex."""

from __future__ import annotations

import types
from typing import Any

_OURS = ("amp_patch", "apex")


def imports_us(main: Any) -> bool:
    """Return whether the script, the module `main`, imports amp_patch or Apex, at top level or in a function.

    Such a script chooses its level itself, and is not trained by `UneditedScript`.
    """
    for value in vars(main).values() if main is not None else ():
        home = getattr(value, "__name__" if isinstance(value, types.ModuleType) else "__module__", "")
        if isinstance(home, str) and home.partition(".")[0] in _OURS:
            return True
        code = value.__code__ if isinstance(value, types.FunctionType) else None
        if code is not None and any(name in _OURS for name in code.co_names):
            return True
    return False

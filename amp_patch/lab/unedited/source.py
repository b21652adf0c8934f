"""Detection of scripts that import amp_patch or Apex."""

from __future__ import annotations

import linecache
import re
import types
from typing import Any

_OURS = ("amp_patch", "apex")
_CHOOSES = re.compile(r"\b(amp_patch|initialize|fp16_utils|FP16_Optimizer)\b")  # how a script chooses its precision


def chooses_its_level(main: Any) -> bool:
    """Return whether the script, the module `main`, trains with amp_patch or Apex, and so chooses its level itself.

    `UneditedScript` does not train such a script. A script that imports Apex for other parts (SyncBatchNorm,
    FusedAdam), and names neither `initialize` nor `fp16_utils`, chooses no level.
    """
    text = "".join(linecache.getlines(getattr(main, "__file__", None) or ""))
    return _imports_us(main) and (not text or _CHOOSES.search(text) is not None)


def _imports_us(main: Any) -> bool:
    """Return whether the module `main` imports amp_patch or Apex, at top level or in a function."""
    for value in vars(main).values() if main is not None else ():
        home = getattr(value, "__name__" if isinstance(value, types.ModuleType) else "__module__", "")
        if isinstance(home, str) and home.partition(".")[0] in _OURS:
            return True
        code = value.__code__ if isinstance(value, types.FunctionType) else None
        if code is not None and any(name in _OURS for name in code.co_names):
            return True
    return False

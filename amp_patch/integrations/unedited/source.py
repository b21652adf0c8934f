"""What the text of a script tells: whether it knows amp_patch, and whether it reads gradients by itself."""

from __future__ import annotations

import ast
import inspect
import types
from typing import Any

_OURS = ("amp_patch", "apex")


def names_us(main: Any) -> bool:
    """Whether the script imports amp_patch or Apex, at its top or in a function there: then it means what it does."""
    for value in vars(main).values() if main is not None else ():
        home = getattr(value, "__name__" if isinstance(value, types.ModuleType) else "__module__", "")
        if isinstance(home, str) and home.partition(".")[0] in _OURS:
            return True
        code = value.__code__ if isinstance(value, types.FunctionType) else None
        if code is not None and any(name in _OURS for name in code.co_names):
            return True
    return False


def line_that_reads_gradients(main: Any) -> int | None:
    """The first line of the script that reads an attribute `grad`; None if none does, or its text is not at hand."""
    try:
        tree = ast.parse(inspect.getsource(main))
    except (OSError, TypeError, SyntaxError):
        return None
    functions = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}  # torch.autograd.grad(...)
    reads = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "grad"
        and isinstance(node.ctx, ast.Load)
        and id(node) not in functions
    ]
    return min(reads, default=None)

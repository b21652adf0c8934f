"""ForwardHook: tells when a model's forward begins. In a file of its own, which torch.compile may trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ForwardHook:
    """A forward pre-hook that calls `began` with the module and the arguments; compiled, it is nothing.

    Copies and pickles of a model that has it have one that does nothing in its place.
    """

    def __init__(self, began: Callable[[Any, Any, Any], None]) -> None:
        self.began = began

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.began(module, args, kwargs)

    def __reduce__(self) -> Any:
        return NoHook, ()


class NoHook:
    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        pass

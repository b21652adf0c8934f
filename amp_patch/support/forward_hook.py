"""Tell when a model's forward begins, compiled or not. In a file of its own, which torch.compile may trace."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

Began = Callable[[Any, Any, Any], None]  # is given the module, its arguments and its keyword arguments


class ForwardHook:
    """A forward pre-hook that calls `began` with the module and the arguments; compiled, it is nothing.

    Copies and pickles of a model that has it have one that does nothing in its place.
    """

    def __init__(self, began: Began) -> None:
        self.began = began

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self.began(module, args, kwargs)

    def __reduce__(self) -> Any:
        return NoHook, ()


class NoHook:
    """The hook that a pickled or copied model has in the place of ours: does nothing."""

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        pass


class CompiledForward:
    """What `module.compile()` leaves in the module, with `began` before each call of it: hooks are compiled away."""

    def __init__(self, module: Any, compiled: Callable[..., Any], began: Began) -> None:
        self.module = weakref.ref(module)
        self.compiled = compiled
        self.began = began

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self.began(self.module(), args, kwargs)
        return self.compiled(*args, **kwargs)


def before_compiled(call: Callable[..., Any], began: Began) -> Callable[..., Any]:
    """`__call__` of what `torch.compile(module)` returns, with `began` before it."""

    @functools.wraps(call)
    def begin_and_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            began(self._orig_mod, args, kwargs)
        return call(self, *args, **kwargs)

    return begin_and_call

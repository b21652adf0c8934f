"""Hooks that call a callback when a model's forward begins, for compiled models too.

They are in `support/`, because torch.compile may trace this folder but not that of recordings, which use them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

Began = Callable[[Any, Any, Any], None]  # receives the module, its arguments and its keyword arguments


class ForwardHook:
    """A forward pre-hook that calls `began`, except in compiled code.

    A copy or a pickle of the model has a `NoHook` instead.
    """

    def __init__(self, began: Began) -> None:
        self.began = began

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self.began(module, args, kwargs)

    def __reduce__(self) -> Any:
        return NoHook, ()


class NoHook:
    """The hook of a pickled or copied model; does nothing."""

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        pass


class CompiledForward:
    """A replacement of the compiled call that `module.compile()` stores: it calls `began` first.

    A `ForwardHook` would not do, because compiled code contains no hook.
    """

    def __init__(self, module: Any, compiled: Callable[..., Any], began: Began) -> None:
        self.module = weakref.ref(module)
        self.compiled = compiled
        self.began = began

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self.began(self.module(), args, kwargs)
        return self.compiled(*args, **kwargs)


def before_compiled(call: Callable[..., Any], began: Began) -> Callable[..., Any]:
    """Wrap `__call__` of the class that `torch.compile(module)` returns, to call `began` first."""

    @functools.wraps(call)
    def begin_and_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            began(self._orig_mod, args, kwargs)
        return call(self, *args, **kwargs)

    return begin_and_call

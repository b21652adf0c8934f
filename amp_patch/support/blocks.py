"""Context managers that end with their `with` statement, also where an exception comes just as `__exit__` is called.

An interrupt (Ctrl-C) may come at the entry of any Python function. At that of an `__exit__` it leaves the block's work
undone, for as long as the process lives. But there is one thing that a `with` statement always does at its end, in C:
it lets go of the bound `__exit__` that it has fetched before it called `__enter__`. So here that object is one of our
own which nobody else holds, no frame and no traceback either, and when it goes, what is left to do is done.

torch's own context managers are not like that. In their place, for two of them, stand calls that go straight into C.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
import weakref
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar

import torch

Yielded = TypeVar("Yielded")
P = ParamSpec("P")
Result = TypeVar("Result")


class _Held(functools.partial[Any]):
    """A bound `__exit__`, held by the `with` statement alone. A partial, since its calls have no frame of their own."""

    @property
    def __func__(self) -> Any:  # Dynamo reads `__func__` of bound methods
        return self.func


class _Fetched(threading.local):
    def __init__(self) -> None:
        self.newest: weakref.ref[_Held] | None = None


_fetched = _Fetched()


class _Exit:
    # A function by `isinstance`: from torch 2.15 on Dynamo enters an object only where the class's `__exit__` is one.
    __class__ = property(lambda _: types.FunctionType)

    def __get__(self, block: Any, owner: Any = None) -> Any:
        if block is None:
            return owner.leave_block  # contextlib.ExitStack reads `__exit__` of the class, and binds it
        held = _Held(type(block).leave_block, block)
        _fetched.newest = weakref.ref(held)
        return held


class Block:
    """The base of context managers. The first subclass writes its `__exit__` as ever; it becomes `leave_block`."""

    __exit__: Any = _Exit()
    leave_block: Any = None  # the `__exit__` that the first subclass defines

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A user's subclass keeps an `__exit__` of its own, which may call `super().__exit__`.
        if cls.leave_block is None and "__exit__" in vars(cls):
            cls.leave_block = vars(cls)["__exit__"]
            del cls.__exit__


def when_left(block: Any, then: Callable[[Any], Any]) -> weakref.ref[Any] | None:
    """For `__enter__` of `block`: have `then` called when the `with` statement that calls it is over.

    It is called with the reference that this returns, at the latest at the end of the statement, as long as that
    exists; on whatever thread lets go of the statement, which for a suspended generator's is any. None, and it is never
    called, where no `with` statement calls `__enter__`.
    """
    newest, _fetched.newest = _fetched.newest, None
    held = None if newest is None else newest()
    return None if held is None or held.args[0] is not block else weakref.ref(held, then)


class _Generated(Block, contextlib._GeneratorContextManager[Yielded, None, None]):
    def __enter__(self) -> Yielded:
        self._left = when_left(self, lambda _: self.gen.close())
        return super().__enter__()

    def __exit__(self, *raised: Any) -> bool | None:
        suppressed = contextlib._GeneratorContextManager.__exit__(self, *raised)
        self._left = None
        return suppressed


def block(
    function: Callable[..., Generator[Yielded, None, None]],
) -> Callable[..., contextlib.AbstractContextManager[Yielded]]:
    """`contextlib.contextmanager`, whose generator ends with the `with` statement at the latest."""

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[Yielded]:
        return _Generated(function, args, kwargs)

    return make


_set_grad_enabled = torch._C._set_grad_enabled
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks


def without_grad(function: Callable[P, Result]) -> Callable[P, Result]:
    """As `torch.no_grad()` around a function."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        before = torch.is_grad_enabled()
        try:
            _set_grad_enabled(False)
            return function(*args, **kwargs)
        finally:
            _set_grad_enabled(before)

    return call


def saving_through(pack: Callable[[Any], Any], unpack: Callable[[Any], Any], call: Callable[[], Result]) -> Result:
    """`call()` as inside of `torch.autograd.graph.saved_tensors_hooks(pack, unpack)`."""
    try:
        # Not bound at import, as `_pop_hooks` is: a recording may replace this one, to count.
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
        return call()
    finally:
        _pop_hooks()

"""Context managers whose exit work is done even if an interrupt arrives at the entry of `__exit__`.

Python may raise KeyboardInterrupt at the entry of any Python function. If that function is `__exit__`, its body never
runs. The remedy uses a fact of CPython: a `with` statement fetches the bound method `__exit__` before it calls
`__enter__`, and frees this object when the statement ends. `Block` makes a bound method that nothing but the statement
references. When it is freed, a weak reference to it calls the callback that `when_left` has registered.

torch's context managers have no such protection. `without_grad` and `saving_through` replace two of them with calls
into C.
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
    """A bound `__exit__` that only the `with` statement references.

    It is a partial, because calling a partial makes no Python frame, at whose entry an interrupt could come.
    """

    @property
    def __func__(self) -> Any:  # Dynamo reads `__func__` of bound methods
        return self.func


class _Fetched(threading.local):
    def __init__(self) -> None:
        self.newest: weakref.ref[_Held] | None = None


_fetched = _Fetched()


class _Exit:
    # Dynamo of torch 2.15 enters an object only if its class's `__exit__` is an instance of FunctionType.
    __class__ = property(lambda _: types.FunctionType)

    def __get__(self, block: Any, owner: Any = None) -> Any:
        if block is None:
            return owner.leave_block  # contextlib.ExitStack reads `__exit__` of the class, and binds it
        held = _Held(type(block).leave_block, block)
        _fetched.newest = weakref.ref(held)
        return held


class Block:
    """Base of context managers; the `__exit__` that the first subclass defines becomes `leave_block`."""

    __exit__: Any = _Exit()
    leave_block: Any = None  # the `__exit__` that the first subclass defines

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A user's subclass keeps the `__exit__` that it defines, which may call `super().__exit__`.
        if cls.leave_block is None and "__exit__" in vars(cls):
            cls.leave_block = vars(cls)["__exit__"]
            del cls.__exit__


def when_left(block: Any, then: Callable[[Any], Any]) -> weakref.ref[Any] | None:
    """Register `then` to be called when the `with` statement around `block` ends; call this in `block.__enter__`.

    `then` receives the returned weak reference. If the caller has dropped that reference, `then` is not called. The
    call is made on the thread that ends the statement; if the statement is in a suspended generator, on any thread.

    Returns:
        The reference. None if `__enter__` was not called by a `with` statement: `then` is never called in that case.
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
    """Decorate as `contextlib.contextmanager` does; the generator is closed even if an interrupt prevents `__exit__`.

    Without this, an interrupt could leave the generator's `finally` clauses undone.
    """

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[Yielded]:
        return _Generated(function, args, kwargs)

    return make


_set_grad_enabled = torch._C._set_grad_enabled
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks


def without_grad(function: Callable[P, Result]) -> Callable[P, Result]:
    """Return `function`, changed to run without grad mode. The mode is set in C, where no interrupt can come."""

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
    """Return `call()`, run inside `torch.autograd.graph.saved_tensors_hooks(pack, unpack)`."""
    try:
        # Looked up at each call, unlike `_pop_hooks`: a recorder may replace this function to count its calls.
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
        return call()
    finally:
        _pop_hooks()

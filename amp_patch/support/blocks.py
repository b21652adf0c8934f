"""Context managers whose `__exit__` runs even if Ctrl-C comes at its entry.

torch's context managers have no such protection. `without_grad` and `saving_through` replace two of them with calls
into C, which also take less time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar

import torch

from amp_patch.support.interrupts import whole

Yielded = TypeVar("Yielded")
P = ParamSpec("P")
Result = TypeVar("Result")


class _Generated(contextlib._GeneratorContextManager[Yielded, None, None]):
    @whole
    def __enter__(self) -> Yielded:
        return super().__enter__()

    @whole
    def __exit__(self, *raised: Any) -> bool | None:
        return super().__exit__(*raised)


def block(
    function: Callable[..., Generator[Yielded, None, None]],
) -> Callable[..., contextlib.AbstractContextManager[Yielded]]:
    """Decorate as `contextlib.contextmanager` does; SIGINT waits for the end of the entry and of the exit."""

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


def unlike_users(pack: Callable[P, Result]) -> Callable[P, Result]:
    """Return `pack`, a saved-tensors hook, marked as none of the user's.

    Without the marks torch 2.15 takes it for one, and warns that selective checkpoints go past it.
    """
    vars(pack).update(_checkpoint_internal=True, _user_hooks=None)
    return pack


def saving_through(pack: Callable[[Any], Any], unpack: Callable[[Any], Any], call: Callable[[], Result]) -> Result:
    """Return `call()`, run inside `torch.autograd.graph.saved_tensors_hooks(pack, unpack)`."""
    try:
        # Looked up at each call, unlike `_pop_hooks`: a recorder may replace this function to count its calls.
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
        return call()
    finally:
        _pop_hooks()

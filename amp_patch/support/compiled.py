"""torch.compile: questions to it that do not import the compiler, which takes a second; what it may trace, or not."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def eagerly() -> AbstractContextManager[Any]:
    """A region in which compiled code runs as plain Python; does not import the compiler."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def is_compiling() -> bool:
    """Whether torch.compile is making a graph on this thread now; does not import the compiler."""
    guards = sys.modules.get("torch._guards")
    return guards is not None and guards.TracingContext.try_get() is not None


def wraps(function: Function) -> Callable[[Callable[..., Any]], Function]:
    """`functools.wraps`, but for the note with which a function that Dynamo has disabled says what is beneath it.

    In torch 2.6 and 2.8 whoever disables or compiles a wrapper that has a copy of that note gets what is beneath, and
    the wrapper is lost. (From 2.11 on the note says whose it is.) Torch itself disables SparseAdam's step at the first
    `torch.compile` of a process.
    """

    def mark(wrapper: Any) -> Any:
        functools.update_wrapper(wrapper, function)
        vars(wrapper).pop("_torchdynamo_orig_callable", None)
        return wrapper

    return mark


def eager_only(function: Function) -> Function:
    """`function`, before and after which torch.compile ends its graphs, as of `torch.compiler.disable`."""
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
        if not disabled and disable is not None:
            disabled.append(disable(function))
        return (disabled[0] if disabled else function)(*args, **kwargs)

    return not_traced(call)


def not_traced(function: Any) -> Any:
    """Mark a function that compiled code calls, and that lies where Dynamo traces nothing (casts/dynamo.py)."""
    function._torchdynamo_disable = True
    return function


def constant_in_traces(function: Function) -> Function:
    """Mark a function that Dynamo calls, with constants, at the point to which its trace has come.

    The result is a constant of what it compiles, in which nothing is left of the call. That is what
    `torch.compiler.assume_constant_result` does, without the import of the compiler.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def uncompiled(model: Any) -> Any:
    """The module inside of what `torch.compile` made of it; anything else as it is."""
    return model._orig_mod if type(model).__name__ == "OptimizedModule" and hasattr(model, "_orig_mod") else model


def asks_first(function: Callable[..., Any], kind: type, prepare: Callable[[list[Any]], list[Any]]) -> Any:
    """`function`, which calls `prepare([data])` if its first argument is of this kind, and holds the result meanwhile.

    Dynamo reads this file, as it does not that of a master: `torch.tensor` in compiled code goes through here.
    """

    @functools.wraps(function)
    def asking(*args: Any, **kwargs: Any) -> Any:
        data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        if not isinstance(data, kind):
            return function(*args, **kwargs)
        held = prepare([data])
        try:
            return function(*args, **kwargs)
        finally:
            held.clear()  # a traceback that keeps this frame would keep the object alive

    return asking

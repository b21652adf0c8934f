"""Queries and marks for torch.compile. No function here imports the compiler, an import of one second."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def is_compiling() -> bool:
    """Tell whether torch.compile traces a graph on this thread now."""
    guards = sys.modules.get("torch._guards")
    return guards is not None and guards.TracingContext.try_get() is not None


def in_backward() -> bool:
    """Tell whether autograd runs on this thread. A forward then is a recomputation of activation checkpointing."""
    return not torch.compiler.is_dynamo_compiling() and torch._C._current_graph_task_id() != -1


def wraps(function: Function) -> Callable[[Callable[..., Any]], Function]:
    """Decorate as `functools.wraps` does, without copying Dynamo's attribute `_torchdynamo_orig_callable`.

    Dynamo sets that attribute on a disabled function, to find the original. If a wrapper has a copy of it, torch 2.6
    and 2.8 disable or compile the original and drop the wrapper. (torch 2.11 checks the attribute's owner.) torch
    disables SparseAdam's step at the first `torch.compile` of a process.
    """

    def mark(wrapper: Any) -> Any:
        functools.update_wrapper(wrapper, function)
        vars(wrapper).pop("_torchdynamo_orig_callable", None)
        return wrapper

    return mark


# Returns what Dynamo does with the next Python frame on this thread: None outside of compiled code. A torch without it
# gives False: `eager_only` then takes each call for one in compiled code.
_frame_callback: Callable[[], Any] = getattr(
    torch._C._dynamo.eval_frame,  # noqa: SLF001
    "get_eval_frame_callback",
    lambda: False,
)


def may_trace_next() -> bool:
    """Tell whether Dynamo may trace the next Python function that this thread calls: a compiled frame's graph broke."""
    return callable(_frame_callback())


def eager_only(function: Function) -> Function:
    """Make torch.compile break the graph around calls of `function`, as `torch.compiler.disable` does.

    Calls outside of compiled code go to `function` itself: the frame of a disabled function takes longer than most of
    the functions that are marked here.
    """
    disabled: Any = None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled  # torch 2.6 traces no list that is appended to
        if not torch.compiler.is_dynamo_compiling() and _frame_callback() is None:  # Dynamo may trace this function
            return function(*args, **kwargs)
        disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)  # None while it is being imported, too
        if disabled is None and disable is not None:
            disabled = disable(function)
        return (disabled or function)(*args, **kwargs)

    return not_traced(call)


def not_traced(function: Any) -> Any:
    """Mark a function that Dynamo must not trace (casts/dynamo.py reads the mark)."""
    function._torchdynamo_disable = True
    return function


def constant_in_traces(function: Function) -> Function:
    """Mark a function that Dynamo calls while it traces; its arguments must be constants.

    The compiled graph holds the result as a constant and does not contain the call. The mark is that of
    `torch.compiler.assume_constant_result`, which would import the compiler.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def uncompiled(model: Any) -> Any:
    """Return the module inside the wrapper that `torch.compile(module)` made; any other object unchanged."""
    return model._orig_mod if type(model).__name__ == "OptimizedModule" and hasattr(model, "_orig_mod") else model


def asks_first(function: Callable[..., Any], kind: type, prepare: Callable[[list[Any]], list[Any]]) -> Any:
    """Wrap `function` to call `prepare([data])` first if its argument `data` is an instance of `kind`.

    The wrapper holds the result of `prepare` until `function` returns. masters/closed_master.py wraps functions such as
    `torch.tensor`. The wrapper is defined here, because compiled code may call it, and Dynamo does not trace masters/.
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

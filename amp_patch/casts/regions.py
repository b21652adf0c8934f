"""Regions: context managers that make one policy's casts act on this thread. The innermost region decides."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from amp_patch.casts import state as casts_state
from amp_patch.casts.state import acting_part, current, default_lock, overrides, refresh_default
from amp_patch.casts.thread_state import Entry, this_thread
from amp_patch.casts.traced_regions import enter_trace_of, leave_traced
from amp_patch.policy import EMULATING, Policy
from amp_patch.support.compiled import Function, wraps
from amp_patch.support.interrupts import WholeFirst, hold_sigint, interruptible, sigint_handler, whole


class region:
    """A part of this thread's calls in which `policy` acts: its casts, if it patches torch's functions.

    A context manager and a decorator; entering costs a few microseconds. One object may be entered several times at
    once, also by several threads: each entry is an `Entry` of the thread. Regions may end in any order, for example if
    a generator is suspended inside one: each exit removes only its own entry, also after an exception. On exit from its
    outermost region the thread frees its cached casts of weights.

    Args:
        policy: None for a region without casts.
        disables_torch_autocast: disable torch.autocast inside for all device types, and on exit enable it again for the
            types that had it. None: do so if the policy casts calls.
        emulated: the type whose products on a CPU are emulated inside, if the policy does not emulate one
            (cpu_half.py).

    Attributes:
        emulated: the type whose products on a CPU are emulated in the region; None for none.
    """

    # Methods of a subclass, or None. `on_entry(entry)` runs just before the region begins to act; `on_exit(entry)`
    # undoes it.
    on_entry: Any = None
    on_exit: Any = None

    def __init__(
        self,
        policy: Policy | None,
        disables_torch_autocast: bool | None = None,
        emulated: torch.dtype | None = None,
    ) -> None:
        self.policy = policy
        self.acting = None if policy is None else acting_part(policy)
        self.emulated = emulated
        if policy is not None and policy.cpu_half in EMULATING:  # Dynamo cannot read all properties
            self.emulated = policy.dtype
        casts = self.acting is not None
        self.disables_torch_autocast = casts if disables_torch_autocast is None else disables_torch_autocast
        self.caches = True
        self.entries: dict[Entry, None] = {}  # those of all threads that last, newest last

    @whole
    def __enter__(self) -> Any:
        if is_dynamo_compiling():
            enter_trace_of(self.acting, self.disables_torch_autocast, self.emulated)
            return self
        if type(sigint_handler()) is not WholeFirst:
            hold_sigint()
        stack = this_thread.stack
        while stack and stack[-1].is_over:
            _leave(stack[-1])
        entry = Entry(self)
        stack.append(entry)
        self.entries[entry] = None
        if self.on_entry is not None:
            self.on_entry(entry)
        entry.depth, entry.task, entry.disabled = casts_state.in_use.begin(self.disables_torch_autocast)
        _follow(entry)
        return self

    @whole
    def __exit__(self, *raised: Any) -> None:
        if is_dynamo_compiling():
            leave_traced()
            return
        for entry in reversed(this_thread.stack):
            if entry.region is self:
                _leave(entry)
                return
        for entry in list(self.entries)[-1:]:  # a generator was closed on a thread that is not in the region
            entry.is_over = True  # the thread that is in it leaves it at its next region
            _leave(entry)

    def __call__(self, function: Function) -> Function:
        """Return `function` with its body inside the region."""
        if is_suspended(function):
            raise TypeError(
                f"{type(self).__name__}: {function.__qualname__} is async or a generator: the code that waits for it "
                "would run in the region too; enter the region around the code between two awaits or yields"
            )

        @wraps(function)
        def body(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():  # Dynamo enters no context manager made outside of the frame
                enter_trace_of(self.acting, self.disables_torch_autocast, self.emulated)
                try:
                    return function(*args, **kwargs)
                finally:
                    leave_traced()
            with self:
                return function(*args, **kwargs)

        return body


def is_suspended(function: Any) -> bool:
    """Tell whether a call of `function` may be suspended: it is a coroutine function or a generator function."""
    kinds = inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction
    return any(is_one(function) for is_one in kinds)


class process_wide_region(region):
    """A region that is also the process default while it lasts.

    Autograd's own threads need this: they recompute checkpointed activations on CUDA devices, and enter no region. If
    two such regions on different threads overlap in time, autograd's threads follow the one entered later. On exit the
    thread frees its cached casts of weights, even if it stays in an outer region, and the scratch memory of emulated
    products: the body of `scale_loss` ends here, and the optimizer's step follows.
    """

    def on_entry(self, entry: Entry) -> None:
        """Make the region's policy the process default. It overrides earlier regions of this kind."""
        with default_lock:
            overrides.append(entry)
            refresh_default()

    def on_exit(self, entry: Entry) -> None:
        """Remove the policy from the overrides, and free this thread's cached casts and scratch memory.

        The calling thread may be another thread than the region's.
        """
        casts_state.in_use.drop_cache()
        casts_state.in_use.free_scratch()
        with default_lock:
            if entry in overrides:
                overrides.remove(entry)
            refresh_default()


def as_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, changed so that a later call on any thread runs under the casts that act here now, if any."""
    within = region(current(), emulated=casts_state.in_use.emulated())

    @interruptible
    def later(*args: Any, **kwargs: Any) -> Any:
        with within:
            return function(*args, **kwargs)

    return later


def _follow(entry: Entry) -> None:
    """Make the policy of `entry`'s region act on this thread: the region is the innermost of the thread now."""
    inner = entry.region
    acts = not this_thread.uncastable_entries
    acting, emulated = (inner.acting, inner.emulated) if acts else (None, None)
    casts_state.in_use.follow(acting, emulated, inner.caches, entry.depth, entry.task)


def _leave(entry: Entry) -> None:
    """Remove `entry` from this thread's regions, and undo its effects.

    Any line may run the garbage collector, which may end another region of the thread. So the innermost region is read
    again after `_follow`.
    """
    stack, on_exit = this_thread.stack, entry.region.on_exit
    entry.region.entries.pop(entry, None)
    if entry not in stack:  # a generator closed on another thread: undo the process-wide part at once
        if on_exit is not None:
            on_exit(entry)
        return
    if entry.disabled:
        _enable_torch_autocast(entry, stack)
    if on_exit is not None:
        on_exit(entry)
    while len(stack) > 1:
        rest = _innermost_but(entry, stack)
        _follow(rest)
        if len(stack) > 1 and _innermost_but(entry, stack) is rest:
            break
    else:
        casts_state.in_use.leave()
    stack.remove(entry)


def _innermost_but(entry: Entry, stack: list[Entry]) -> Entry:
    """Return the innermost entry of `stack` other than `entry`. `stack` has at least two entries."""
    return stack[-2] if stack[-1] is entry else stack[-1]


def _enable_torch_autocast(ended: Entry, stack: list[Entry]) -> None:
    """Enable torch.autocast again for the device types that the region of `ended` disabled.

    If a region that was entered later also disables a type and has not ended, the type stays disabled until its exit.
    """
    for entry in stack[stack.index(ended) + 1 :]:
        if entry.region.disables_torch_autocast and entry.depth == ended.depth:
            entry.disabled |= ended.disabled
            return
    casts_state.in_use.end(ended.disabled, ended.depth)

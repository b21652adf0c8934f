"""Regions of a thread in which a policy holds; the innermost one says whose casts act."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from amp_patch.casts import state as casts_state
from amp_patch.casts.state import acting_part, current, default_lock, effective_default, overrides, refresh_default
from amp_patch.casts.thread_state import Entry, is_running, this_thread
from amp_patch.casts.traced_regions import enter_trace_of, leave_traced
from amp_patch.policy import EMULATING, Policy
from amp_patch.support import blocks
from amp_patch.support.compiled import Function, wraps


class region(blocks.Block):
    """A region of this thread in which `policy` holds; its casts act there if it patches torch's functions.

    A context manager and a decorator. Costs a few microseconds. One object may be entered again while it is entered,
    and by several threads: what is restored on exit lives in the thread. Regions may end in any order, as where a
    generator is suspended inside one: each takes only itself away, exceptions or not. When the thread leaves its
    outermost region it forgets the weights it has cast.

    Args:
        policy: None for a region in which no casts of ours act.
        disables_torch_autocast: torch.autocast is off inside, for all device types, and afterwards on again where it
            was. None: if the policy patches torch's functions.
        emulated: the type whose products on a CPU are emulated inside, where the policy does not say it (cpu_half.py).

    Attributes:
        emulated: the type whose products on a CPU are emulated in the region; None for none.
        call: the frame of the call for which one hook enters the region and another one leaves it; else None. If an
            exception ends that call in between, the next region that this thread enters takes this one away.
    """

    # A subclass's own methods: `on_entry(entry)` runs before the region holds; `on_exit(entry)` undoes `on_entry`, of
    # which all, a part (after an interrupt) or nothing may have been done. None: the subclass has nothing to do there.
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
        if policy is not None and policy.cpu_half in EMULATING:  # fields: Dynamo cannot read all properties of policies
            self.emulated = policy.dtype
        casts = self.acting is not None
        self.disables_torch_autocast = casts if disables_torch_autocast is None else disables_torch_autocast
        self.caches = True
        self.call: FrameType | None = None

    def __enter__(self) -> Any:
        if is_dynamo_compiling():
            enter_trace_of(self.acting, self.disables_torch_autocast, self.emulated)
            return self
        stack = this_thread.stack
        while stack and _is_over(stack[-1]):
            _leave(stack[-1])
        entry = Entry(self)
        entry.left = blocks.when_left(self, functools.partial(_leave, entry))
        stack.append(entry)
        if self.on_entry is not None:
            self.on_entry(entry)
        entry.depth, entry.task, entry.disabled = casts_state.in_use.begin(self.disables_torch_autocast)
        _follow(entry)
        return self

    def __exit__(self, *raised: Any) -> None:
        if is_dynamo_compiling():
            leave_traced()
            return
        for entry in reversed(this_thread.stack):
            if entry.region is self:
                _leave(entry)
                return
        self.on_exit_elsewhere()

    def on_exit_elsewhere(self) -> None:
        """`__exit__` was called on a thread that is not in the region: undo that part of `on_entry` that all share."""

    def __call__(self, function: Function) -> Function:
        """`function` with its body in the region; of a generator function, every step of the body."""
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{type(self).__name__}: {function.__qualname__} is async: other tasks of its thread would run in the "
                "region while it waits; enter the region around the code between two awaits"
            )
        if inspect.isgeneratorfunction(function):

            @wraps(function)
            def steps(*args: Any, **kwargs: Any) -> Any:
                return (yield from _inside(self, function(*args, **kwargs)))

            return steps

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


class no_casts_within(region):
    """A region of this thread without casts, also in all regions inside of it, those of models included.

    Source: Apex's `disable_casts`. (Inside `amp.disable_casts` the forward of a training's model has its casts again.)
    """

    def __init__(self) -> None:
        super().__init__(None, disables_torch_autocast=True)

    def on_entry(self, entry: Entry) -> None:
        """No region inside of this one acts, until `on_exit`."""
        this_thread.uncastable_entries.append(entry)

    def on_exit(self, entry: Entry) -> None:
        """Undo `on_entry`."""
        if entry in this_thread.uncastable_entries:
            this_thread.uncastable_entries.remove(entry)


class process_wide_region(region):
    """A region that is also the process default while it lasts.

    For autograd's own threads: they recompute checkpointed activations on CUDA devices, and no region of ours is
    entered there. Where two such regions overlap in time on different threads, both share autograd's threads, and the
    later one holds there. On exit the thread forgets the weights that it has cast, be this its outermost region or not,
    and frees the scratch of emulated products: the body of `scale_loss` ends here, and the optimizer's step follows.
    """

    def on_entry(self, entry: Entry) -> None:
        """The region's policy becomes the process default, over those of other such regions."""
        with default_lock:
            overrides.append(entry)
            refresh_default()

    def on_exit(self, entry: Entry) -> None:
        """Take the policy back, and free the thread's cast weights and scratch; also on a thread outside the region."""
        casts_state.in_use.drop_cache()
        casts_state.in_use.free_scratch()
        with default_lock:
            if entry in overrides:
                overrides.remove(entry)
            refresh_default()

    def on_exit_elsewhere(self) -> None:
        """Take back the newest policy of this region whose entry no `with` statement made."""
        # `left is None`: the entry of a `with` statement ends with that statement, wherever `__exit__` is called.
        for entry in reversed(overrides):
            if entry.region is self and entry.left is None:
                self.on_exit(entry)
                return


def as_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, to be called later, on any thread, with the casts that act on this thread now (or with none)."""
    within = region(current(), emulated=casts_state.in_use.emulated())

    def later(*args: Any, **kwargs: Any) -> Any:
        with within:
            return function(*args, **kwargs)

    return later


def as_default(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, to be called on a new thread, in a region of the process default.

    Without a region the default does not act inside a torch.autocast that the new thread has entered before.
    """

    def later(*args: Any, **kwargs: Any) -> Any:
        with region(effective_default()):
            return function(*args, **kwargs)

    return later


def _follow(entry: Entry) -> None:
    """Have the thread follow the region of `entry`, now its innermost one."""
    inner = entry.region
    acts = not this_thread.uncastable_entries
    acting, emulated = (inner.acting, inner.emulated) if acts else (None, None)
    casts_state.in_use.follow(acting, emulated, inner.caches, entry.depth, entry.task)


def _is_over(entry: Entry) -> bool:
    """Whether an entry is still there though its `with` statement, or the call around its hooks, has ended."""
    left, call = entry.left, entry.region.call
    return (left is not None and left() is None) or (call is not None and not is_running(call))


def _leave(entry: Entry, _: Any = None) -> None:
    """Take `entry` away.

    An interrupt may come at any line: the entry leaves the stack last, so that the next call finds the entry there and
    does the rest. Any line may also run the garbage collector, which may end another region of the thread: so the
    innermost region is looked up again after `_follow`.
    """
    stack, on_exit = this_thread.stack, entry.region.on_exit
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
    entry.left = None


def _innermost_but(entry: Entry, stack: list[Entry]) -> Entry:
    """The innermost entry of `stack`, which has two or more, that is not `entry`."""
    return stack[-2] if stack[-1] is entry else stack[-1]


def _enable_torch_autocast(ended: Entry, stack: list[Entry]) -> None:
    """Turn torch.autocast on again, or leave that to a later region that disables it too and still lasts."""
    for entry in stack[stack.index(ended) + 1 :]:
        if entry.region.disables_torch_autocast and entry.depth == ended.depth:
            entry.disabled |= ended.disabled
            return
    casts_state.in_use.end(ended.disabled, ended.depth)


def _inside(entered_region: region, steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """`steps`, each of them inside the region, and nothing of the consumer's between two of them."""
    advance: Callable[[], Any] = functools.partial(next, steps)
    try:
        while True:
            try:
                with entered_region:
                    item = advance()
            except StopIteration as stop:
                return stop.value
            try:
                sent = yield item
            except GeneratorExit:
                raise
            except BaseException as error:
                advance = functools.partial(steps.throw, error)
            else:
                advance = functools.partial(steps.send, sent)
    finally:
        with entered_region:
            steps.close()

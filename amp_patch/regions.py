"""Whose casts act here and now: the policy of a thread's regions, the process default, and the cast weights."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from amp_patch import multi_tensor
from amp_patch.policy import Policy
from amp_patch.support import blocks

# Ours and torch.autocast side by side: the inner one wins. A region of ours that casts, or whose word is "no casts",
# turns torch's off while it lasts. A torch.autocast entered inside of one (torch counts them), on or off, has the word
# in there: our casts step aside. FP16 on a CPU is emulated all the same where torch's is off: that casts nothing.
# Backward is the exception: what torch enters by itself, switched off, is its custom_bwd, for a forward without it.
_DEVICE_TYPES = tuple(
    kind
    for kind in ("cpu", "cuda", "mtia", "maia", "xpu", "ipu", "hpu", "xla", "privateuseone", "mps")
    if torch.amp.is_autocast_available(kind)
)
_is_enabled, _set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled


def _native_depth() -> int:
    """How many torch.autocast regions this thread is in."""
    try:
        torch.autocast_increment_nesting()
    finally:
        depth = torch.autocast_decrement_nesting()
    return depth


@functools.cache
def _aside(acting: Policy | None) -> Policy | None:
    """What is left of `acting` where it steps aside."""
    return replace(acting, patch_torch_functions=False) if acting is not None and acting.emulates else None


@dataclass(slots=True, eq=False)
class _Entry:
    """A region that a thread is in, and what it found there on entry.

    Attributes:
        depth: how many torch.autocast regions the thread was in.
        task: the pass of autograd that it was in; -1 for none.
        silenced: the device types whose torch.autocast it has turned off, in the form of the state in use.
        left: takes the entry away when the `with` statement is over, if `__exit__` has not; see blocks.py.
    """

    region: region
    depth: int = 0
    task: int = -1
    silenced: Any = ()
    left: Any = None


@dataclass(slots=True)
class _Traced:
    """A region in code that is being traced: as an `_Entry`, and how to turn torch.autocast on again."""

    acting: Policy | None
    depth: int
    undo: list[Callable[[], object]]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Entry] = []  # innermost last
        self.acting: Policy | None = None
        self.depth, self.task = 0, -1  # of the innermost region; outside these
        self.inside = False
        self.caches = False
        self.firm: list[_Entry] = []  # the regions of the kind `no_casts_within` that the thread is in
        self.casts: dict[Any, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        self.traced: list[_Traced] = []  # what acts in the code that torch.compile traces, innermost last
        self.silence: Callable[[str], Callable[[], object]] | None = None


_thread = _Thread()


class PythonState:
    """Whose casts act, and the weights that each thread has cast: the one place where wrappers and rules read it.

    `amp_patch._C.casts` holds the same functions in C++, where the patched functions in C read it without a call.
    """

    def __init__(self) -> None:
        self._default: Policy | None = None

    def current(self) -> Policy | None:
        """What this thread follows: what `follow` said last, or the default; what is left of it inside torch's."""
        acting = _thread.acting if _thread.inside else self._default
        return acting if acting is None or self._holds() else _aside(acting)

    def _holds(self) -> bool:
        if torch._C._is_any_autocast_enabled():
            return False
        return _native_depth() <= _thread.depth or torch._C._current_graph_task_id() not in (-1, _thread.task)

    def begin(self, claims: bool) -> tuple[int, int, Any]:
        """(depth, task, silenced) of a region that begins here; if it `claims`, torch.autocast is off from now on."""
        silenced = frozenset(kind for kind in _DEVICE_TYPES if claims and _is_enabled(kind))
        depth, task = _native_depth(), torch._C._current_graph_task_id()
        for kind in silenced:
            _set_enabled(kind, False)
        return depth, task, silenced

    def end(self, silenced: Any, depth: int) -> None:
        """Undo a `begin`, unless the torch.autocast that it has turned off is gone, or one inside is left open."""
        if _native_depth() == depth:
            for kind in silenced:
                _set_enabled(kind, True)

    def follow(self, acting: Policy | None, aside: Policy | None, caches: bool, depth: int, task: int) -> None:
        """This thread is in a region: it follows `acting`, and remembers the weights it casts if `caches`.

        Inside a torch.autocast that is deeper than `depth`, or is on, it follows `aside`.
        """
        _thread.inside, _thread.acting, _thread.caches = True, acting, caches
        _thread.depth, _thread.task = depth, task

    def leave(self) -> None:
        """This thread is outside regions again: it follows the default and forgets its cast weights."""
        _thread.inside, _thread.acting, _thread.caches = False, None, False
        _thread.depth, _thread.task = 0, -1
        _thread.casts.clear()

    def set_default(self, acting: Policy | None, aside: Policy | None) -> None:
        self._default = acting

    def drop_cache(self) -> None:
        _thread.casts.clear()

    def cached(self) -> int:
        """How many casts this thread remembers."""
        return len(_thread.casts)

    def cast_weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if not _thread.caches or not _may_remember(weight):
            return weight.to(dtype)
        casts = _thread.casts
        wants_grad = weight.requires_grad and torch.is_grad_enabled()
        key = (id(weight), dtype, wants_grad, torch.is_inference_mode_enabled())
        entry = casts.get(key)
        version = weight._version  # before the cast: another thread may change the weight meanwhile
        if entry is not None and entry[0]() is weight and entry[1] == version:
            return entry[2]
        cast = weight.to(dtype)
        if _thread.caches:  # what ran meanwhile may have left the region
            casts[key] = (weakref.ref(weight, functools.partial(_forget, casts, key)), version, cast)
        return cast


_state: Any = PythonState() if (_extension := multi_tensor.extension()) is None else _extension.casts

# The process default is what the casts follow outside regions. `everywhere` overrides it for a while; overlapping
# overrides (threads) may end in any order, so each takes out its own entry.
_lock = threading.RLock()  # a region may end wherever the garbage collector finds its generator
_base: Policy | None = None
_overrides: list[_Entry] = []


def current() -> Policy | None:
    """The policy whose casts act on this thread now, None if none do.

    In a region it is the region's, or None if that policy neither patches nor emulates FP16; elsewhere it is the
    process default. Inside a torch.autocast that was entered later, on or off, it does not patch.
    """
    return traced() if is_dynamo_compiling() else _state.current()


def entered() -> Policy | None:
    """The policy of this thread's innermost region, patching or not; None outside. `disable_casts` is transparent."""
    for inner in reversed(_thread.stack):
        if inner.region.policy is not None:
            return inner.region.policy
    return None


def outside() -> bool:
    """Whether this thread is in no region, so that the process default holds."""
    return not _thread.stack


def set_default(policy: Policy | None) -> None:
    """Make `policy` the process default: what the casts follow outside regions. One that does not patch is None."""
    global _base
    with _lock:
        _base = _acting(policy)
        _refresh_default()


def default() -> Policy | None:
    """What `set_default` made the process default."""
    return _base


def state() -> Any:
    """The `PythonState` or `amp_patch._C.casts` that is in use."""
    return _state


def use_state(state: Any) -> None:
    """Put `state` in the place of the one in use, for `casts.use_backend`. Every thread must be outside regions."""
    global _state
    with _lock:
        _state.set_default(None, None)
        _state = state
        _refresh_default()


def drop_cache() -> None:
    """Forget the weights that this thread has cast."""
    _state.drop_cache()


class region(blocks.Block):
    """A region of this thread in which `policy` holds; its casts act there if it patches torch's functions.

    A context manager and a decorator. Costs a few microseconds. One object may be entered again while it is
    entered, and by several threads: what is restored on exit lives in the thread. Regions may end in any order (a
    generator that is suspended inside one, say): each takes only itself away, exceptions or not. When the thread leaves
    its outermost region it forgets the weights it has cast.

    Args:
        policy: None for a region in which no casts of ours act.
        claims: torch.autocast is off inside, for all device types, and afterwards on again where it was. None: if the
            policy patches torch's functions.

    Attributes:
        call: where a hook enters the region and another one leaves it, the call that they belong to. If an exception
            ends it in between, the thread's next region takes this one away.
    """

    def __init__(self, policy: Policy | None, claims: bool | None = None) -> None:
        self.policy = policy
        self.acting = _acting(policy)
        # Traced code has no cached functions, and only `acting` counts there.
        self.aside = None if is_dynamo_compiling() else _aside(self.acting)
        self.claims = policy is not None and policy.patch_torch_functions if claims is None else claims
        self.caches = True
        self.call: FrameType | None = None

    def __enter__(self) -> Any:
        if is_dynamo_compiling():
            enter_trace_of(self.acting, self.claims)
            return self
        stack = _thread.stack
        while stack and _is_over(stack[-1]):
            _leave(stack[-1])
        entry = _Entry(self)
        entry.left = blocks.when_left(self, functools.partial(_leave, entry))
        stack.append(entry)
        self._begin(entry)
        entry.depth, entry.task, entry.silenced = _state.begin(self.claims)
        _follow(entry)
        return self

    def __exit__(self, *raised: Any) -> None:
        if is_dynamo_compiling():
            leave_traced()
            return
        for entry in reversed(_thread.stack):
            if entry.region is self:
                _leave(entry)
                return
        self._end_elsewhere()

    def _begin(self, entry: _Entry) -> None:
        """What a kind of region does on entry besides."""

    def _end(self, entry: _Entry) -> None:
        """Undo `_begin`: done already, half or not at all."""

    def _end_elsewhere(self) -> None:
        """`__exit__` on a thread that is not in the region: undo of `_begin` what other threads share."""

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with its body in the region; of a generator function, every step of the body."""
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{type(self).__name__}: {function.__qualname__} is async: other tasks of its thread would run in the "
                "region while it waits; enter the region around the code between two awaits"
            )
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def steps(*args: Any, **kwargs: Any) -> Any:
                return (yield from _inside(self, function(*args, **kwargs)))

            return steps

        @functools.wraps(function)
        def body(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():  # which enters no context manager that was made outside of what it compiles
                enter_trace_of(self.acting, self.claims)
                try:
                    return function(*args, **kwargs)
                finally:
                    leave_traced()
            with self:
                return function(*args, **kwargs)

        return body


class no_casts_within(region):
    """A region of this thread without casts; regions inside of it, those of models included, do not bring them back.

    Source: Apex's `disable_casts`. Ours, `casts.disable_casts`, ends where a model of another training begins.
    """

    def __init__(self) -> None:
        super().__init__(None, claims=True)

    def _begin(self, entry: _Entry) -> None:
        _thread.firm.append(entry)

    def _end(self, entry: _Entry) -> None:
        if entry in _thread.firm:
            _thread.firm.remove(entry)


class everywhere(region):
    """A region that is also the process default while it lasts.

    Autograd's own threads recompute checkpointed activations on CUDA devices, and no region of ours is entered there.
    Two of these that overlap in time on different threads share those autograd threads; there the later one holds. On
    exit the thread forgets the weights that it has cast, nested or not.
    """

    def _begin(self, entry: _Entry) -> None:
        with _lock:
            _overrides.append(entry)
            _refresh_default()

    def _end(self, entry: _Entry) -> None:
        drop_cache()
        with _lock:
            if entry in _overrides:
                _overrides.remove(entry)
            _refresh_default()

    def _end_elsewhere(self) -> None:
        # An entry that has a `with` statement goes with that.
        for entry in reversed(_overrides):
            if entry.region is self and entry.left is None:
                self._end(entry)
                return


def begin_trace(acting: Policy | None, silence: Callable[[str], Callable[[], object]] | None) -> None:
    """torch.compile begins to trace a frame on this thread, where `acting` acts.

    Args:
        silence: turns torch.autocast off in what is traced from here on, for a device type; returns how to undo that.
    """
    _thread.traced, _thread.silence = [_Traced(acting, _native_depth(), [])], silence


def enter_trace_of(acting: Policy | None, claims: bool) -> None:
    """As `follow`, in code that is being traced; `leave_traced` ends it."""
    if acting is None:
        enter_traced(None, claims)
    else:
        enter_traced(
            (acting.dtype, acting.patch_torch_functions, acting.allow_banned, acting.cpu_fp16, acting.op_lists), claims
        )


# Dynamo calls these three while it traces, with constants, and nothing of them is left in what it compiles: that is
# what `torch.compiler.assume_constant_result` asks for, without importing the compiler. It really enters torch.autocast
# when it comes to one. Where nobody has begun the trace, nothing acts.


def traced() -> Policy | None:
    """What acts at the point that a trace has come to."""
    if not _thread.traced:
        return None
    inner = _thread.traced[-1]
    if inner.acting is None or (_native_depth() <= inner.depth and not torch._C._is_any_autocast_enabled()):
        return inner.acting
    return _aside(inner.acting)


def enter_traced(casts: tuple[Any, ...] | None, claims: bool) -> None:
    if _thread.traced:
        silence = _thread.silence if claims else None
        undo = [silence(kind) for kind in _DEVICE_TYPES if _is_enabled(kind)] if silence is not None else []
        _thread.traced.append(_Traced(None if casts is None else casts_policy(*casts), _native_depth(), undo))


def leave_traced() -> None:
    if _thread.traced:
        for undo in reversed(_thread.traced.pop().undo):
            undo()


_constants: tuple[Any, ...] = (traced, enter_traced, leave_traced)
for _function in _constants:
    _function._dynamo_marked_constant = True


@functools.cache
def casts_policy(
    dtype: torch.dtype, patch_torch_functions: bool, allow_banned: bool, cpu_fp16: str, op_lists: str
) -> Policy:
    """The one policy that stands for all that cast alike."""
    return Policy(
        "O1" if patch_torch_functions else "O2",
        dtype=dtype,
        patch_torch_functions=patch_torch_functions,
        allow_banned=allow_banned,
        cpu_fp16=cpu_fp16,
        op_lists=op_lists,
    )


def is_running(call: FrameType | None) -> bool:
    """Whether this thread is inside of `call`, a frame, which may be referred to after its end."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None


def as_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, to be called later, on any thread, with the casts that act on this thread now (or with none)."""
    within = region(current())

    def later(*args: Any, **kwargs: Any) -> Any:
        with within:
            return function(*args, **kwargs)

    return later


def as_default(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, to be called on a thread that has just begun: the process default holds, torch.autocast or not."""

    def later(*args: Any, **kwargs: Any) -> Any:
        with region(_default()):
            return function(*args, **kwargs)

    return later


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight.to(dtype)`, remembered within the thread's outermost region if `weight` is an FP32 leaf parameter.

    A remembered cast serves only calls that would make the same one: the same tensor with the same version counter,
    and the same grad mode (a cast made under `no_grad` has no path back to the weight, pytorch#65766; one made under
    `inference_mode` cannot be saved for backward). An edit through `.data` does not move the version counter: call
    `drop_cache` after one in the middle of a region.

    The tensor is held weakly and its entry goes when it goes. (A cast that autograd can differentiate holds its weight
    itself, until the region ends.)
    """
    return weight.to(dtype) if is_dynamo_compiling() else _state.cast_weight(weight, dtype)


def _may_remember(weight: Tensor) -> bool:
    if weight.dtype is not torch.float32 or not weight.is_leaf or weight.is_inference():
        return False
    if not weight.requires_grad and not issubclass(type(weight), torch.nn.Parameter):
        return False
    return is_plain_eager()  # else the result is dead or wrong afterwards


def is_plain_eager() -> bool:
    """False under a function transform, a dispatch mode or a trace, whose tensors are stand-ins."""
    return (
        torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
    )


def _forget(casts: dict[Any, Any], key: Any, reference: Any) -> None:
    # The id may have been reused, and the entry with it, before this call came.
    entry = casts.get(key)
    if entry is not None and entry[0] is reference:
        del casts[key]


def _acting(policy: Policy | None) -> Policy | None:
    return policy if policy is not None and (policy.patch_torch_functions or policy.emulates) else None


def _refresh_default() -> None:
    acting = _default()
    _state.set_default(acting, _aside(acting))


def _default() -> Policy | None:
    return _overrides[-1].region.acting if _overrides else _base


def _follow(entry: _Entry) -> None:
    inner = entry.region
    acting, aside = (None, None) if _thread.firm else (inner.acting, inner.aside)
    _state.follow(acting, aside, inner.caches, entry.depth, entry.task)


def _is_over(entry: _Entry) -> bool:
    """Whether an entry that is still there should not be: its hook, or its generator on another thread, has ended."""
    left, call = entry.left, entry.region.call
    return (left is not None and left() is None) or (call is not None and not is_running(call))


def _leave(entry: _Entry, _: Any = None) -> None:
    """Take `entry` away. After an exception in here the next call does the rest: what is looked for goes last.

    Anything in here may run the garbage collector, and that may end another region of the thread.
    """
    stack = _thread.stack
    if entry not in stack:
        entry.region._end(entry)  # its generator has ended on another thread: the process default is everyone's
        return
    if entry.silenced:
        _unsilence(entry, stack)
    entry.region._end(entry)
    while True:
        rest = _innermost_but(entry, stack)
        if rest is None:
            _state.leave()
        else:
            _follow(rest)
        if _innermost_but(entry, stack) is rest:
            break
    stack.remove(entry)
    entry.left = None


def _innermost_but(entry: _Entry, stack: list[_Entry]) -> _Entry | None:
    if stack[-1] is not entry:
        return stack[-1]
    return stack[-2] if len(stack) > 1 else None


def _unsilence(ended: _Entry, stack: list[_Entry]) -> None:
    """`ended` turns torch.autocast on again, or leaves that to a region that began later and wants it off."""
    for entry in stack[stack.index(ended) + 1 :]:
        if entry.region.claims and entry.depth == ended.depth:
            entry.silenced |= ended.silenced
            return
    _state.end(ended.silenced, ended.depth)


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

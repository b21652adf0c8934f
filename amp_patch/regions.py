"""Whose casts act here and now: the policy of a thread's regions, the process default, and the cast weights."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from amp_patch import multi_tensor

if TYPE_CHECKING:
    from amp_patch.policy import Policy

_OUTSIDE: Any = object()  # what `_Thread.acting` is while the thread is in no region


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[region] = []  # innermost last
        self.acting: Policy | None = _OUTSIDE
        self.caches = False
        self.firm = 0  # how many regions of the kind `no_casts_within` the thread is in
        self.casts: dict[Any, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        self.traced: list[Policy | None] = []  # what acts in the code that torch.compile traces, innermost last


_thread = _Thread()


class PythonState:
    """Whose casts act, and the weights that each thread has cast: the one place where wrappers and rules read it.

    `amp_patch._C.casts` holds the same functions in C++, where the patched functions in C read it without a call.
    """

    def __init__(self) -> None:
        self._default: Policy | None = None

    def current(self) -> Policy | None:
        """What this thread follows: what `follow` said last, or the default."""
        acting = _thread.acting
        return self._default if acting is _OUTSIDE else acting

    def follow(self, acting: Policy | None, caches: bool) -> None:
        """This thread is in a region: it follows `acting`, and remembers the weights it casts if `caches`."""
        _thread.acting, _thread.caches = acting, caches

    def leave(self) -> None:
        """This thread is outside regions again: it follows the default and forgets its cast weights."""
        _thread.acting, _thread.caches = _OUTSIDE, False
        _thread.casts.clear()

    def set_default(self, acting: Policy | None) -> None:
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
_lock = threading.Lock()
_base: Policy | None = None
_overrides: list[everywhere] = []


def current() -> Policy | None:
    """The policy whose casts act on this thread now, None if none do.

    In a region it is the region's, or None if that policy neither patches nor emulates FP16; elsewhere it is the
    process default.
    """
    return traced() if is_dynamo_compiling() else _state.current()


def entered() -> Policy | None:
    """The policy of this thread's innermost region, patching or not; None outside. `disable_casts` is transparent."""
    for inner in reversed(_thread.stack):
        if inner.policy is not None:
            return inner.policy
    return None


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
        _state.set_default(None)
        _state = state
        _refresh_default()


def drop_cache() -> None:
    """Forget the weights that this thread has cast."""
    _state.drop_cache()


class region:
    """A region of this thread in which `policy` holds; its casts act there if it patches torch's functions.

    A context manager and a decorator. Costs about a microsecond. One object may be entered again while it is entered,
    and by several threads: what is restored on exit lives in the thread. Regions may end in any order (a generator that
    is suspended inside one, say): each takes only itself away, exceptions or not. When the thread leaves its outermost
    region it forgets the weights it has cast.
    """

    def __init__(self, policy: Policy | None) -> None:
        self.policy = policy
        self.acting = _acting(policy)
        self.caches = True

    def __enter__(self) -> Any:
        if is_dynamo_compiling():
            enter_traced(self.acting)
            return self
        _thread.stack.append(self)
        _state.follow(None if _thread.firm else self.acting, self.caches)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if is_dynamo_compiling():
            leave_traced()
            return
        stack = _thread.stack
        if stack and stack[-1] is self:
            stack.pop()
        else:
            _remove_last(stack, self)
        if stack:
            _state.follow(None if _thread.firm else stack[-1].acting, stack[-1].caches)
        else:
            _state.leave()

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
                enter_traced(self.acting)
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
        super().__init__(None)

    def __enter__(self) -> Any:
        _thread.firm += 1
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _thread.firm -= 1
        super().__exit__(kind, error, traceback)


class everywhere(region):
    """A region that is also the process default while it lasts.

    Autograd's own threads recompute checkpointed activations on CUDA devices, and no region of ours is entered there.
    Two of these that overlap in time on different threads share those autograd threads; there the later one holds. On
    exit the thread forgets the weights that it has cast, nested or not.
    """

    def __enter__(self) -> Any:
        with _lock:
            _overrides.append(self)
            _refresh_default()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        drop_cache()
        with _lock:
            _remove_last(_overrides, self)
            _refresh_default()


def begin_trace(acting: Policy | None) -> None:
    """torch.compile begins to trace a frame on this thread, where `acting` acts."""
    _thread.traced = [acting]


def traced() -> Policy | None:
    """What acts at the point that a trace has come to."""
    return _thread.traced[-1] if _thread.traced else None


def enter_traced(acting: Policy | None) -> None:
    """As `follow`, of a region that is being traced: Dynamo calls this while it traces, and leaves no trace of it."""
    _thread.traced.append(acting)


def leave_traced() -> None:
    """The end of that region."""
    _thread.traced.pop()


for _function in (traced, enter_traced, leave_traced):
    # What torch.compiler.assume_constant_result does, without importing the compiler.
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def as_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, to be called later, on any thread, with the casts that act on this thread now (or with none)."""
    within = region(current())

    def later(*args: Any, **kwargs: Any) -> Any:
        with within:
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
    _state.set_default(_overrides[-1].acting if _overrides else _base)


def _remove_last(stack: list[Any], item: Any) -> None:
    for index in range(len(stack) - 1, -1, -1):
        if stack[index] is item:
            del stack[index]
            return


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

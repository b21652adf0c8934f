"""Whose casts act: what this thread follows, the process default, and the weights that were cast."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from amp_patch import multi_tensor
from amp_patch.casts.thread_state import (
    DEVICE_TYPES,
    Entry,
    is_enabled,
    native_depth,
    set_enabled,
    stepped_aside,
    this_thread,
)
from amp_patch.casts.traced_regions import traced
from amp_patch.policy import Policy


class PythonState:
    """Whose casts act, and the weights that each thread has cast: the one place where wrappers and rules read it.

    `amp_patch._C.casts` holds the same functions in C++, where the patched functions in C read it without a call.
    """

    def __init__(self) -> None:
        self._default: Policy | None = None

    def current(self) -> Policy | None:
        """What this thread follows: what `follow` said last, or the default; what is left of it inside torch's."""
        acting = this_thread.acting if this_thread.inside else self._default
        return acting if acting is None or self._holds() else stepped_aside(acting)

    def _holds(self) -> bool:
        if torch._C._is_any_autocast_enabled():
            return False
        return native_depth() <= this_thread.depth or torch._C._current_graph_task_id() not in (-1, this_thread.task)

    def begin(self, claims: bool) -> tuple[int, int, Any]:
        """(depth, task, silenced) of a region that begins here; if it `claims`, torch.autocast is off from now on."""
        silenced = frozenset(kind for kind in DEVICE_TYPES if claims and is_enabled(kind))
        depth, task = native_depth(), torch._C._current_graph_task_id()
        for kind in silenced:
            set_enabled(kind, False)
        return depth, task, silenced

    def end(self, silenced: Any, depth: int) -> None:
        """Undo a `begin`, unless the torch.autocast that it has turned off is gone, or one inside is left open."""
        if native_depth() == depth:
            for kind in silenced:
                set_enabled(kind, True)

    def follow(self, acting: Policy | None, aside: Policy | None, caches: bool, depth: int, task: int) -> None:
        """This thread is in a region: it follows `acting`, and remembers the weights it casts if `caches`.

        Inside a torch.autocast that is deeper than `depth`, or is on, it follows `aside`.
        """
        this_thread.inside, this_thread.acting, this_thread.caches = True, acting, caches
        this_thread.depth, this_thread.task = depth, task

    def leave(self) -> None:
        """This thread is outside regions again: it follows the default and forgets its cast weights."""
        this_thread.inside, this_thread.acting, this_thread.caches = False, None, False
        this_thread.depth, this_thread.task = 0, -1
        this_thread.casts.clear()

    def set_default(self, acting: Policy | None, aside: Policy | None) -> None:
        self._default = acting

    def drop_cache(self) -> None:
        this_thread.casts.clear()

    def cached(self) -> int:
        """How many casts this thread remembers."""
        return len(this_thread.casts)

    def cast_weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        if not this_thread.caches or not _may_remember(weight):
            return weight.to(dtype)
        casts = this_thread.casts
        wants_grad = weight.requires_grad and torch.is_grad_enabled()
        key = (id(weight), dtype, wants_grad, torch.is_inference_mode_enabled())
        entry = casts.get(key)
        version = weight._version  # before the cast: another thread may change the weight meanwhile
        if entry is not None and entry[0]() is weight and entry[1] == version:
            return entry[2]
        cast = weight.to(dtype)
        if this_thread.caches:  # what ran meanwhile may have left the region
            casts[key] = (weakref.ref(weight, functools.partial(_forget, casts, key)), version, cast)
        return cast


_state: Any = PythonState() if (_extension := multi_tensor.extension()) is None else _extension.casts

# The process default is what the casts follow outside regions. `everywhere` overrides it for a while; overlapping
# overrides (threads) may end in any order, so each takes out its own entry.
default_lock = threading.RLock()  # a region may end wherever the garbage collector finds its generator
_base: Policy | None = None
overrides: list[Entry] = []


def current() -> Policy | None:
    """The policy whose casts act on this thread now, None if none do.

    In a region it is the region's, or None if that policy neither patches nor emulates FP16; elsewhere it is the
    process default. Inside a torch.autocast that was entered later, on or off, it does not patch.
    """
    return traced() if is_dynamo_compiling() else _state.current()


def entered() -> Policy | None:
    """The policy of this thread's innermost region, patching or not; None outside. `disable_casts` is transparent."""
    for inner in reversed(this_thread.stack):
        if inner.region.policy is not None:
            return inner.region.policy
    return None


def outside() -> bool:
    """Whether this thread is in no region, so that the process default holds."""
    return not this_thread.stack


def set_default(policy: Policy | None) -> None:
    """Make `policy` the process default: what the casts follow outside regions. One that does not patch is None."""
    global _base
    with default_lock:
        _base = acting_part(policy)
        refresh_default()


def default() -> Policy | None:
    """What `set_default` made the process default."""
    return _base


def state() -> Any:
    """The `PythonState` or `amp_patch._C.casts` that is in use."""
    return _state


def use_state(state: Any) -> None:
    """Put `state` in the place of the one in use, for `casts.use_backend`. Every thread must be outside regions."""
    global _state
    with default_lock:
        _state.set_default(None, None)
        _state = state
        refresh_default()


def drop_cache() -> None:
    """Forget the weights that this thread has cast."""
    _state.drop_cache()


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


def acting_part(policy: Policy | None) -> Policy | None:
    return policy if policy is not None and (policy.patch_torch_functions or policy.emulates) else None


def refresh_default() -> None:
    acting = effective_default()
    _state.set_default(acting, stepped_aside(acting))


def effective_default() -> Policy | None:
    return overrides[-1].region.acting if overrides else _base

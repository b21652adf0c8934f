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
    this_thread,
)
from amp_patch.casts.traced_regions import traced
from amp_patch.policy import Policy


class PythonState:
    """Whose casts act, and the weights that each thread has cast: what wrappers and rules read at each call.

    `amp_patch._C.casts` has the same functions in C++. Its wrappers read what they keep without a call.
    """

    def __init__(self) -> None:
        self._default: Policy | None = None
        self._default_emulated: torch.dtype | None = None

    def current(self) -> Policy | None:
        """The policy whose casts act on this thread: what `follow` said last, or the default outside regions.

        None inside a torch.autocast that was entered later.
        """
        acting = this_thread.acting if this_thread.inside else self._default
        return acting if acting is None or self._holds() else None

    def emulated(self) -> torch.dtype | None:
        """The type whose products on a CPU are emulated on this thread now; see cpu_half.py."""
        return this_thread.emulated if this_thread.inside else self._default_emulated

    def _holds(self) -> bool:
        """Whether no torch.autocast has been entered since the innermost region began; see thread_state.py."""
        if torch._C._is_any_autocast_enabled():
            return False
        return native_depth() <= this_thread.depth or torch._C._current_graph_task_id() not in (-1, this_thread.task)

    def emulated_calls(self) -> int:
        """How many ops were emulated on this thread so far."""
        return this_thread.emulated_calls

    def begin(self, disables_torch_autocast: bool) -> tuple[int, int, Any]:
        """A region begins: what its `Entry` keeps, (depth, task, disabled).

        With `disables_torch_autocast` it is off from now on, for the device types in `disabled`.
        """
        disabled = frozenset(kind for kind in DEVICE_TYPES if disables_torch_autocast and is_enabled(kind))
        depth, task = native_depth(), torch._C._current_graph_task_id()
        for kind in disabled:
            set_enabled(kind, False)
        return depth, task, disabled

    def end(self, disabled: Any, depth: int) -> None:
        """Enable torch.autocast again for the device types that `begin` has disabled at `depth`.

        Not at another depth: the torch.autocast that was turned off has ended meanwhile, or one inside is still open.
        """
        if native_depth() == depth:
            for kind in disabled:
                set_enabled(kind, True)

    def follow(self, acting: Policy | None, emulated: torch.dtype | None, caches: bool, depth: int, task: int) -> None:
        """This thread is in a region: from now on `acting` acts, and casts of weights are remembered if `caches`.

        Inside a torch.autocast (one that is enabled, or makes torch's count exceed `depth`) no policy acts. Products of
        type `emulated` are emulated there too: the emulation casts nothing.
        """
        this_thread.inside, this_thread.acting, this_thread.caches = True, acting, caches
        this_thread.emulated = emulated
        this_thread.depth, this_thread.task = depth, task

    def leave(self) -> None:
        """This thread is outside regions again: the default acts, and the thread forgets the weights it has cast."""
        this_thread.inside, this_thread.acting, this_thread.caches = False, None, False
        this_thread.emulated = None
        this_thread.depth, this_thread.task = 0, -1
        this_thread.casts.clear()

    def set_default(self, acting: Policy | None, emulated: torch.dtype | None) -> None:
        """What acts, and what is emulated, outside regions on all threads."""
        self._default, self._default_emulated = acting, emulated

    def drop_cache(self) -> None:
        """See `drop_cache` below."""
        this_thread.casts.clear()

    def free_scratch(self) -> None:
        """Free the FP32 memory that this thread keeps from one emulated product (cpu_half.py) to the next.

        Those in C++ keep up to 32 MiB; those in Python keep nothing.
        """

    def cached(self) -> int:
        """How many casts this thread remembers."""
        return len(this_thread.casts)

    def cast_weight(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """See `cast_weight` below."""
        if not this_thread.caches or not _may_remember(weight):
            return weight.to(dtype)
        casts = this_thread.casts
        wants_grad = weight.requires_grad and torch.is_grad_enabled()
        key = (id(weight), dtype, wants_grad, torch.is_inference_mode_enabled())
        entry = casts.get(key)
        version = weight._version  # read before the cast: another thread may write the weight during it
        if entry is not None and entry[0]() is weight and entry[1] == version:
            return entry[2]
        cast = weight.to(dtype)
        if this_thread.caches:  # again: the garbage collector may end the region during the cast
            casts[key] = (weakref.ref(weight, functools.partial(_forget, casts, key)), version, cast)
        return cast


# The `PythonState` or `amp_patch._C.casts` that wrappers and regions ask; `use_state` puts another one in its place.
in_use: Any = PythonState() if (_extension := multi_tensor.extension()) is None else _extension.casts

# The process default is the policy whose casts act outside regions: what `set_default` said, or while a
# `process_wide_region` lasts, that of the newest one. Regions of several threads may end in any order.
default_lock = threading.RLock()  # re-entrant: the garbage collector may end a region while this thread holds it
_base: tuple[Policy | None, torch.dtype | None] = (None, None)  # what `set_default` was given, and what that emulates
_UNSET = object()
_followed_default: Any = None  # the process default that the state in use has; _UNSET while that is being changed
overrides: list[Entry] = []  # one for each `process_wide_region` that lasts, newest last


def current() -> Policy | None:
    """The policy whose casts act on this thread now, None if none do.

    In a region it is the region's, or None if that policy casts nothing around torch's functions; elsewhere it is the
    process default. None inside a torch.autocast that was entered later, on or off.
    """
    return traced() if is_dynamo_compiling() else in_use.current()


def outside() -> bool:
    """Whether this thread is in no region, so that the process default holds."""
    return not this_thread.stack


def set_default(policy: Policy | None) -> None:
    """Make `policy` the process default, whose casts act outside regions. None, or one that casts nothing: no casts."""
    global _base
    with default_lock:
        acting = acting_part(policy)
        _base = acting, None if acting is None else acting.emulated
        refresh_default()


def default() -> Policy | None:
    """What `set_default` made the process default."""
    return _base[0]


def state() -> Any:
    """The `PythonState` or `amp_patch._C.casts` that is in use."""
    return in_use


def use_state(state: Any) -> None:
    """Put `state` in the place of the one in use, for `install.use_backend`. No thread may be in a region."""
    global in_use, _followed_default
    with default_lock:
        in_use.set_default(None, None)
        in_use, _followed_default = state, _UNSET
        refresh_default()


def drop_cache() -> None:
    """Forget the weights that this thread has cast."""
    in_use.drop_cache()


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight.to(dtype)`, remembered within the thread's outermost region if `weight` is an FP32 leaf parameter.

    A remembered cast serves only calls that would make the same one: the same tensor with the same version counter,
    and the same grad mode (a cast made under `no_grad` has no path back to the weight, pytorch#65766; one made under
    `inference_mode` cannot be saved for backward). An edit through `.data` does not move the version counter: call
    `drop_cache` after one in the middle of a region.

    The weight is held weakly: when it dies, its cast is forgotten. (A cast that autograd can differentiate holds its
    weight itself, until the region ends.)
    """
    return weight.to(dtype) if is_dynamo_compiling() else in_use.cast_weight(weight, dtype)


def _may_remember(weight: Tensor) -> bool:
    if weight.dtype is not torch.float32 or not weight.is_leaf or weight.is_inference():
        return False
    if not weight.requires_grad and not issubclass(type(weight), torch.nn.Parameter):
        return False
    return is_plain_eager()  # under a transform or a trace a cast is a stand-in, dead afterwards


def is_plain_eager() -> bool:
    """False under a function transform, a dispatch mode or a trace, whose tensors are stand-ins."""
    return (
        torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
    )


def _forget(casts: dict[Any, Any], key: Any, reference: Any) -> None:
    # Before this callback runs another tensor may have got the id, and an entry under the same key.
    entry = casts.get(key)
    if entry is not None and entry[0] is reference:
        del casts[key]


def acting_part(policy: Policy | None) -> Policy | None:
    """`policy` if it casts calls of torch's functions, else None."""
    casts = policy is not None and (policy.patch_torch_functions or policy.product_format is not None)
    return policy if casts else None


def refresh_default() -> None:
    """Have the state in use follow the process default, if another one. The caller holds `default_lock`."""
    global _followed_default
    # A loop: the garbage collector may end a region, and call this function again, between any two of these lines.
    while (default := (overrides[-1].region.acting, overrides[-1].region.emulated) if overrides else _base) != (
        _followed_default
    ):
        _followed_default = _UNSET  # an interrupt before the last line then has the next call do all of them
        in_use.set_default(*default)
        _followed_default = default


def effective_default() -> Policy | None:
    """The process default: the newest override's, else what `set_default` said."""
    return overrides[-1].region.acting if overrides else _base[0]

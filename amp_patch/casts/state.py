"""The policy whose casts act on this thread, the process default, and the cached casts of weights."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from amp_patch import multi_tensor
from amp_patch.casts.thread_state import DEVICE_TYPES, Entry, is_enabled, native_depth, set_enabled, this_thread
from amp_patch.casts.traced_regions import traced
from amp_patch.policy import Policy


class PythonState:
    """The state that wrappers and rules read at each call: the acting policy, and each thread's cached casts.

    For processes without the extension. With it, `amp_patch._C.casts` has the same functions in C++.
    """

    def __init__(self) -> None:
        self._default: Policy | None = None
        self._default_emulated: torch.dtype | None = None

    def current(self) -> Policy | None:
        """Return the policy whose casts act on this thread.

        In a region this is the policy that the last `follow` received; outside regions it is the process default. If a
        torch.autocast was entered later than the region, it is None.
        """
        acting = this_thread.acting if this_thread.inside else self._default
        return acting if acting is None or self._holds() else None

    def emulated(self) -> torch.dtype | None:
        """Return the type whose products on a CPU are emulated on this thread now; see cpu_half.py."""
        return this_thread.emulated if this_thread.inside else self._default_emulated

    def _holds(self) -> bool:
        """Tell whether no torch.autocast was entered after the innermost region began; see thread_state.py."""
        if torch._C._is_any_autocast_enabled():
            return False
        return native_depth() <= this_thread.depth or torch._C._current_graph_task_id() not in (-1, this_thread.task)

    def emulated_calls(self) -> int:
        """Return the number of ops that were emulated on this thread so far."""
        return this_thread.emulated_calls

    def begin(self, disables_torch_autocast: bool) -> tuple[int, int, Any]:
        """Begin a region; return (depth, task, disabled), the fields of the region's `Entry`.

        With `disables_torch_autocast`, first disable torch.autocast for each device type with an enabled one:
        `disabled` has these types.
        """
        disabled = frozenset(kind for kind in DEVICE_TYPES if disables_torch_autocast and is_enabled(kind))
        depth, task = native_depth(), torch._C._current_graph_task_id()
        for kind in disabled:
            set_enabled(kind, False)
        return depth, task, disabled

    def end(self, disabled: Any, depth: int) -> None:
        """Enable torch.autocast again for the device types `disabled`; `begin` has returned `disabled` and `depth`.

        If the thread is now in more or fewer torch.autocasts than `depth`, change nothing: either the torch.autocast
        that `begin` disabled has ended, or an inner one has not ended yet.
        """
        if native_depth() == depth:
            for kind in disabled:
                set_enabled(kind, True)

    def follow(self, acting: Policy | None, emulated: torch.dtype | None, caches: bool, depth: int, task: int) -> None:
        """Make a region this thread's innermost one: `acting` acts, and casts of weights are cached if `caches`.

        While a torch.autocast is enabled, or the thread is in more than `depth` torch.autocasts, no policy acts.
        Products of type `emulated` are emulated even then, because emulation casts nothing.
        """
        this_thread.inside, this_thread.acting, this_thread.caches = True, acting, caches
        this_thread.emulated = emulated
        this_thread.depth, this_thread.task = depth, task

    def leave(self) -> None:
        """Leave all regions on this thread: the default acts, and the cached casts of weights are freed."""
        this_thread.inside, this_thread.acting, this_thread.caches = False, None, False
        this_thread.emulated = None
        this_thread.depth, this_thread.task = 0, -1
        this_thread.casts.clear()

    def set_default(self, acting: Policy | None, emulated: torch.dtype | None) -> None:
        """Set the policy that acts, and the type that is emulated, outside regions on all threads."""
        self._default, self._default_emulated = acting, emulated

    def drop_cache(self) -> None:
        """See `drop_cache` below."""
        this_thread.casts.clear()

    def free_scratch(self) -> None:
        """Free the FP32 memory that this thread keeps between emulated products (cpu_half.py).

        The kernels in C++ keep up to 32 MiB. The kernels in Python keep nothing.
        """

    def cached(self) -> int:
        """Return the number of casts that this thread has cached."""
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
        if this_thread.caches:  # tested again, because the garbage collector may end the region during the cast
            casts[key] = (weakref.ref(weight, functools.partial(_forget, casts, key)), version, cast)
        return cast


# The `PythonState` or `amp_patch._C.casts` that wrappers and regions use; `use_state` replaces it.
in_use: Any = PythonState() if (_extension := multi_tensor.extension()) is None else _extension.casts

# The process default is the policy whose casts act outside regions. It is the policy of the newest
# `process_wide_region` that has not ended; if there is none, the argument of the last `set_default`. Regions of several
# threads may end in any order.
default_lock = threading.RLock()  # re-entrant: the garbage collector may end a region while this thread holds it
_base: tuple[Policy | None, torch.dtype | None] = (None, None)  # the arguments of `set_default`
_UNSET = object()
_followed_default: Any = None  # the default that `in_use` has received; _UNSET while it is being changed
overrides: list[Entry] = []  # the entries of process-wide regions that have not ended, newest last


def current() -> Policy | None:
    """Return the policy whose casts act on this thread now, or None.

    In a region this is the region's policy, or None if that policy does not cast calls of torch's functions. Outside
    regions it is the process default. Inside a torch.autocast that was entered later, enabled or not, it is None.
    """
    return traced() if is_dynamo_compiling() else in_use.current()


def outside() -> bool:
    """Tell whether this thread is in no region, so that the process default acts."""
    return not this_thread.stack


def set_default(policy: Policy | None) -> None:
    """Make `policy` the process default: its casts act outside regions. If it is None or casts none, none act there."""
    global _base
    with default_lock:
        acting = acting_part(policy)
        _base = acting, None if acting is None else acting.emulated
        refresh_default()


def default() -> Policy | None:
    """Return the policy that `set_default` made the process default."""
    return _base[0]


def state() -> Any:
    """Return the `PythonState` or `amp_patch._C.casts` that is in use."""
    return in_use


def use_state(state: Any) -> None:
    """Use `state` from now on, for tests. No thread may be in a region, and no casts installed."""
    global in_use, _followed_default
    with default_lock:
        in_use.set_default(None, None)
        in_use, _followed_default = state, _UNSET
        refresh_default()


def drop_cache() -> None:
    """Free the weights that this thread has cast."""
    in_use.drop_cache()


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `weight.to(dtype)`; for an FP32 leaf parameter cache it until the thread's outermost region ends.

    A cached cast is used only for the same tensor with the same version counter and the same grad mode. (A cast made
    under `no_grad` has no path back to the weight, pytorch#65766; a cast made under `inference_mode` cannot be saved
    for backward.) An edit through `.data` does not change the version counter: call `drop_cache` after such an edit
    inside a region.

    The cache references the weight weakly: when the weight is freed, its cast is freed too. (A cast with a graph keeps
    its weight alive until the region ends.)
    """
    return weight.to(dtype) if is_dynamo_compiling() else in_use.cast_weight(weight, dtype)


def _may_remember(weight: Tensor) -> bool:
    if weight.dtype is not torch.float32 or not weight.is_leaf or weight.is_inference():
        return False
    if not weight.requires_grad and not issubclass(type(weight), torch.nn.Parameter):
        return False
    return is_plain_eager()  # under a transform or a trace, a cast has no use afterwards


def is_plain_eager() -> bool:
    """Tell whether no function transform, dispatch mode or trace is active: their tensors have no values."""
    return (
        torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
    )


def _forget(casts: dict[Any, Any], key: Any, reference: Any) -> None:
    # Before this callback runs, another tensor may have got the same id and stored its cast under the same key.
    entry = casts.get(key)
    if entry is not None and entry[0] is reference:
        del casts[key]


def acting_part(policy: Policy | None) -> Policy | None:
    """Return `policy` if it casts calls of torch's functions, else None."""
    casts = policy is not None and (policy.patch_torch_functions or policy.product_format is not None)
    return policy if casts else None


def refresh_default() -> None:
    """Pass the process default to the state in use, if it has changed. The caller holds `default_lock`."""
    global _followed_default
    # A loop: the garbage collector may end a region, and call this function again, between any two of these lines.
    while (default := (overrides[-1].region.acting, overrides[-1].region.emulated) if overrides else _base) != (
        _followed_default
    ):
        _followed_default = _UNSET  # if an interrupt comes before the last line, the next call repeats all lines
        in_use.set_default(*default)
        _followed_default = default

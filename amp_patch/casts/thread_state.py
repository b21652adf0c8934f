"""State of one thread: the regions that it is in, and the torch.autocasts around them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amp_patch.policy import Policy

# Regions of this package and of torch.autocast may be nested in any order. The innermost one decides the casts:
#
# - A region that casts, or that keeps casts off, disables torch.autocast while it lasts.
# - Inside a torch.autocast that is entered in a region, enabled or not, the region's casts do not act. Torch counts the
#   torch.autocasts that a thread is in: a higher count than at the region's beginning means that the thread has entered
#   one inside the region.
# - In a backward pass that started inside the region, a higher count is ignored: torch's own `custom_bwd` enters a
#   disabled torch.autocast if the forward ran without torch.autocast.
DEVICE_TYPES = tuple(
    kind
    for kind in ("cpu", "cuda", "mtia", "maia", "xpu", "ipu", "hpu", "xla", "privateuseone", "mps")
    if torch.amp.is_autocast_available(kind)
)
is_enabled, set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled


def native_depth() -> int:
    """Return the number of torch.autocast regions that this thread is in."""
    try:
        torch.autocast_increment_nesting()
    finally:
        depth = torch.autocast_decrement_nesting()
    return depth


@dataclass(slots=True, eq=False)
class Entry:
    """A region that a thread is in, with the thread's state at the region's beginning.

    Attributes:
        region: the `regions.region`.
        depth: the number of torch.autocasts that the thread was in.
        task: torch's number of the backward pass that the thread was in; -1 for none.
        disabled: the device types whose torch.autocast the region has disabled, as returned by the state's `begin`.
        is_over: whether another thread has left the region (a generator was closed there).
    """

    region: Any
    depth: int = 0
    task: int = -1
    disabled: Any = ()
    is_over: bool = False


@dataclass(slots=True)
class Traced:
    """A region in code that torch.compile is tracing.

    Attributes:
        acting: the policy whose casts act in the region.
        depth: the number of torch.autocasts around the region when the trace entered it.
        undo: functions that enable torch.autocast again in the code traced after the region.
    """

    acting: Policy | None
    depth: int
    undo: list[Callable[[], object]]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[Entry] = []  # the regions that the thread is in, innermost last
        self.uncastable_entries: list[Entry] = []  # the entries in `stack` of Apex's `disable_casts`
        # Fields of `PythonState`:
        self.inside = False  # whether the thread is in a region
        self.acting: Policy | None = None  # the policy that acts in the innermost region
        self.emulated: torch.dtype | None = None  # the type whose products are emulated there (cpu_half.py)
        self.depth, self.task = 0, -1  # those of the innermost `Entry`; 0 and -1 outside regions
        self.caches = False  # whether casts of weights are cached now
        self.casts: dict[Any, tuple[weakref.ref[Tensor], int, Tensor]] = {}  # cached casts: see `cast_weight`
        self.emulated_calls = 0  # the number of ops that the kernels of cpu_half.py have emulated
        # Fields of a trace of torch.compile on this thread:
        self.traced: list[Traced] = []  # traced regions, innermost last; the first is the frame itself
        self.traced_emulated: torch.dtype | None = None  # the type that a region in the trace emulates
        self.disable: Callable[[str], Callable[[], object]] | None = None  # see `traced_regions.begin_trace`


this_thread = _Thread()

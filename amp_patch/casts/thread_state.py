"""What one thread knows of the regions that it is in, and of torch.autocast around them."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from amp_patch.policy import Policy

# Ours and torch.autocast side by side: the inner one wins. A region of ours that casts, or whose word is "no casts",
# turns torch's off while it lasts. A torch.autocast entered inside of one (torch counts them), on or off, has the word
# in there: our casts step aside. FP16 on a CPU is emulated all the same where torch's is off: that casts nothing.
# Backward is the exception: what torch enters by itself, switched off, is its custom_bwd, for a forward without it.
DEVICE_TYPES = tuple(
    kind
    for kind in ("cpu", "cuda", "mtia", "maia", "xpu", "ipu", "hpu", "xla", "privateuseone", "mps")
    if torch.amp.is_autocast_available(kind)
)
is_enabled, set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled


def native_depth() -> int:
    """How many torch.autocast regions this thread is in."""
    try:
        torch.autocast_increment_nesting()
    finally:
        depth = torch.autocast_decrement_nesting()
    return depth


@functools.cache
def stepped_aside(acting: Policy | None) -> Policy | None:
    """What is left of `acting` where it steps aside."""
    return replace(acting, patch_torch_functions=False) if acting is not None and acting.emulates else None


@dataclass(slots=True, eq=False)
class Entry:
    """A region that a thread is in, and what it found there on entry.

    Attributes:
        region: the `regions.region`.
        depth: how many torch.autocast regions the thread was in.
        task: the pass of autograd that it was in; -1 for none.
        silenced: the device types whose torch.autocast it has turned off, in the form of the state in use.
        left: takes the entry away when the `with` statement is over, if `__exit__` has not; see blocks.py.
    """

    region: Any
    depth: int = 0
    task: int = -1
    silenced: Any = ()
    left: Any = None


@dataclass(slots=True)
class Traced:
    """A region in code that is being traced: as an `_Entry`, and how to turn torch.autocast on again."""

    acting: Policy | None
    depth: int
    undo: list[Callable[[], object]]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[Entry] = []  # innermost last
        self.acting: Policy | None = None
        self.depth, self.task = 0, -1  # of the innermost region; outside these
        self.inside = False
        self.caches = False
        self.firm: list[Entry] = []  # the regions of the kind `no_casts_within` that the thread is in
        self.casts: dict[Any, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        self.traced: list[Traced] = []  # what acts in the code that torch.compile traces, innermost last
        self.silence: Callable[[str], Callable[[], object]] | None = None


this_thread = _Thread()


def is_running(call: FrameType | None) -> bool:
    """Whether this thread is inside of `call`, a frame, which may be referred to after its end."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not call:
        frame = frame.f_back
    return frame is not None

"""Counters of syncs with the device."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators that read a value from the device, or a size that depends on values.
SYNCS = (
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "nonzero_static",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "repeat_interleave",
)


class _Counting(TorchDispatchMode):
    """The stand-in on a CPU, which never waits: counts the operators that would on a GPU."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name in SYNCS:
            self.counts[name] += 1
        if name.startswith("index") and any(
            isinstance(t, torch.Tensor) and t.dtype is torch.bool for arg in args[1:2] if arg for t in arg
        ):
            self.counts["boolean index"] += 1
        return func(*args, **(kwargs or {}))


def hear_the_notice():
    """Let torch say now, unheard, what it says once when its detector is first used: as an error it would come later.

    It would come after the mode is set, and be taken for a sync.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("default")


class Syncs:
    """Counts while a block runs; on a GPU torch's own detector does, which sees what C++ asks for too."""

    def __init__(self, device):
        self.device = device

    @contextlib.contextmanager
    def counting(self):
        self.count = 0
        if self.device == "cpu":
            counting = _Counting()
            counting_tolist = _tolist_counted(counting)
            with counting, counting_tolist:
                yield
            self.count = sum(counting.counts.values())
            return
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)
        self.count = sum("called a synchronizing CUDA operation" in str(w.message) for w in caught)


@contextlib.contextmanager
def _tolist_counted(counting):
    """A CPU tensor's tolist() reads memory without an operator; a CUDA tensor's is a copy that waits."""
    original = torch.Tensor.tolist

    def tolist(self):
        counting.counts["tolist"] += 1
        with torch.utils._python_dispatch._disable_current_modes():
            return original(self)

    torch.Tensor.tolist = tolist
    try:
        yield
    finally:
        del torch.Tensor.tolist


def count(device, body):
    syncs = Syncs(device)
    with syncs.counting():
        body()
    return syncs.count


class CopiesToOrFrom(TorchDispatchMode):
    """Counts the operators that take tensors of the CPU and of `device`, or move one: on a GPU they would wait for it.

    With "meta" for the device this needs none, as long as no code reads a value.
    """

    def __init__(self, device):
        super().__init__()
        self.device = device
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        if {t.device.type for t in tensors} >= {"cpu", self.device}:
            self.counts[func._schema.name.removeprefix("aten::")] += 1
        return result

"""How often code waits for the device."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# What torch asks the device for an answer with, or a size that depends on values.
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
    """The stand-in on a CPU, where nothing waits: counts the operators that would on a GPU."""

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
        self.count = sum("synchroniz" in str(w.message) for w in caught)


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

"""The peak memory of a training, from CUDA's allocator, or on a CPU from the operating system."""

from __future__ import annotations

import sys
import weakref
from contextlib import suppress
from pathlib import Path

import torch

# Bound at import, because `run --device cpu` replaces torch.cuda's functions by ones that call this file.
_has_cuda = torch.cuda.is_initialized
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """A measurement of the peak memory from construction on."""

    def __init__(self) -> None:
        self._resident = _status("VmRSS")
        self._before = _largest_ever()
        self._banked: dict[str, int] = {}  # kind of device -> the peak before the last reset
        _reset()
        _measuring.add(self)

    def bank(self) -> None:
        """Store the peak until now. Without this, it is lost if user code resets the allocator's peak."""
        for kind in ("cpu", "cuda"):
            if (peak := self._since_reset(kind)) is not None:
                self._banked[kind] = max(peak, self._banked.get(kind, 0))

    def read(self, device: str) -> int | None:
        """Return the peak in bytes: for "cuda" of the allocated memory, for "cpu" of the process's growth.

        None if the system does not report it, or for another `device`.
        """
        self.bank()
        return self._banked.get(device)

    def _since_reset(self, device: str) -> int | None:
        if device == "cuda":
            if not _has_cuda():
                return None
            return sum(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count()))
        peak = _status("VmHWM")
        if peak is not None and self._resident is not None:
            return max(0, peak - self._resident)
        peak = _largest_ever()
        if peak is None or self._before is None or peak == self._before:
            return None  # the peak is from before the construction, and the peak since then is not known
        return peak - self._before


_measuring: weakref.WeakSet[PeakMemory] = weakref.WeakSet()


def _reset() -> None:
    """Reset the peaks of the allocator and the system. All measurements share these, so each stores its peak first."""
    for measurement in list(_measuring):
        measurement.bank()
    if _has_cuda():
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)
    with suppress(OSError):
        _CLEAR.write_text("5")  # resets VmHWM, on Linux


def listed_bytes(path: Path, name: str) -> int | None:
    """Return in bytes the size `name` that Linux lists in the file `path`, as "VmRSS:  123 kB".

    None if the file has no such line, or does not exist.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def process_peak() -> int | None:
    """Return the largest resident size of this process, in bytes; None if the system does not report it."""
    return _status("VmHWM") or _largest_ever()


def _status(name: str) -> int | None:
    return listed_bytes(_STATUS, name)


def _largest_ever() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024

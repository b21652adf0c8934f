"""Replacements for the functions of `torch.cuda`: they describe a machine with one GPU, which is this CPU."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from amp_patch.run.no_cuda import devices
from amp_patch.support.patches import Patches

CAPABILITY = (7, 0)  # the first with FP16 tensor cores, and the oldest that amp_patch's kernels support
NAME = "CPU as CUDA (amp_patch)"
# Versions of CUDA, cuDNN and NCCL that a CPU build of torch then reports: scripts split torch.version.cuda at import. A
# CUDA build keeps its own.
CUDA, CUDNN, NCCL = "12.4", 90100, (2, 21, 5)


class Stream:
    """A CUDA stream on a CPU: each call was finished when it returned, so there is never work to wait for."""

    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.priority = priority

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass


class Event:
    """A CUDA event on a CPU: a point in wall-clock time."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any):
        self._seconds: float | None = None

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds of wall-clock time between the two calls of `record`."""
        if self._seconds is None or end_event._seconds is None:
            raise RuntimeError("Event.elapsed_time: both events must have been recorded")
        return 1e3 * (end_event._seconds - self._seconds)

    def query(self) -> bool:
        return True

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass


class EmptyBlock(contextlib.nullcontext[None]):
    """The context manager of torch.cuda.device(...), device_of(...) and stream(...): it does nothing."""

    def __init__(self, place: Any = None) -> None:
        super().__init__()
        self.stream = place


class Nothing:
    """The object of torch.cuda.cudart(): any function of it does nothing and returns 0, success."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *args: 0


def _memory() -> int:
    """Return the bytes of memory of this machine; 16 GiB if the system does not report them."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # not Unix
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 16 << 30


def _free_memory() -> int:
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return _memory()


def _rng_state() -> torch.Tensor:
    """Return a tensor of zeros with the size of a CUDA generator's state, for scripts that save that state."""
    return torch.zeros(16, dtype=torch.uint8, device="cpu")


def _synchronize(device: Any = None) -> None:
    if devices.target != "cpu":
        getattr(torch, devices.target).synchronize()


def _properties(device: Any = None) -> Any:
    major, minor = CAPABILITY
    return SimpleNamespace(
        name=NAME, major=major, minor=minor, total_memory=_memory(), multi_processor_count=os.cpu_count() or 1
    )


@contextlib.contextmanager
def _block(*args: Any, **kwargs: Any) -> Iterator[None]:
    yield


# Result -> the functions of torch.cuda, and of its modules, that return it. A callable replaces the function.
_ANSWERS: tuple[tuple[Any, str], ...] = (
    (True, "is_available is_initialized is_bf16_supported"),
    (False, "is_current_stream_capturing is_tf32_supported can_device_access_peer"),
    (1, "device_count"),
    (
        0,
        "current_device current_blas_handle get_sync_debug_mode initial_seed "
        "memory_allocated memory_reserved memory_cached device_memory_used "
        "max_memory_allocated max_memory_reserved max_memory_cached "
        "memory_usage utilization temperature power_draw clock_rate "
        "nvtx.range_push nvtx.range_pop nvtx.range_start",
    ),
    (
        None,
        "init set_device empty_cache ipc_collect set_stream set_sync_debug_mode "
        "manual_seed manual_seed_all seed seed_all set_rng_state set_rng_state_all reset_accumulated_memory_stats "
        "reset_peak_memory_stats reset_max_memory_allocated reset_max_memory_cached "
        "set_per_process_memory_fraction nvtx.mark nvtx.range_end profiler.init profiler.start profiler.stop",
    ),
    (_synchronize, "synchronize"),
    ("", "list_gpu_processes"),
    (1.0, "get_per_process_memory_fraction"),
    (NAME, "get_device_name"),
    (CAPABILITY, "get_device_capability"),
    (NCCL, "nccl.version"),
    (_properties, "get_device_properties"),
    (lambda *_: (_free_memory(), _memory()), "mem_get_info"),
    (lambda *_, **__: Counter(), "memory_stats"),
    (f"{NAME}: no memory of CUDA", "memory_summary"),
    (lambda *_: [], "get_arch_list memory_snapshot"),
    (lambda *_: _rng_state(), "get_rng_state"),
    (lambda *_: [_rng_state()], "get_rng_state_all"),
    (lambda *_: Stream(), "current_stream default_stream"),
    (lambda *_: Nothing(), "cudart"),
    (_block, "nvtx.range profiler.profile"),
)
_CLASSES: tuple[tuple[type, str], ...] = (
    (Stream, "Stream ExternalStream"),
    (Event, "Event"),
    (EmptyBlock, "device device_of stream StreamContext"),
)


def redirect_machine(patches: Patches) -> None:
    """Replace the functions of torch.cuda by ones that describe one GPU with this machine's memory."""
    if torch.version.cuda is None:
        patches.set(torch.version, "cuda", CUDA)
    if torch.backends.cudnn.version() is None:
        patches.set(torch.backends.cudnn, "version", _answering(CUDNN))
    for answer, names in (*_ANSWERS, *_CLASSES):
        for path in names.split():
            owner, name = _find(torch.cuda, path)
            if name not in vars(owner):
                continue  # this release of torch has no such function
            stand_in = answer if callable(answer) else _answering(answer)
            # In the defining module too: scripts also call torch.cuda.memory.*, random.* and streams.*.
            home = importlib.import_module(getattr(vars(owner)[name], "__module__", owner.__name__))
            for place in {owner, home}:
                patches.set(place, name, stand_in)


def _find(module: ModuleType, path: str) -> tuple[Any, str]:
    inner, _, name = path.rpartition(".")
    return (getattr(module, inner) if inner else module), name


def _answering(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value

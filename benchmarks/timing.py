"""What the benchmarks share: rivals timed in turns, the ratio of two of them, a table, and JSON that names the machine.

A turn times every rival once, in an order that rotates from turn to turn, so that a machine that is busy for a while
slows all of them. Rivals are compared turn by turn: the ratio is the median of the turns' ratios, and what the machine
does between two turns leaves no trace in it. Times by themselves say little; none is promised anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

import torch

from amp_patch import multi_tensor

# Runs its subject once (or a few times) and returns the microseconds of one run.
Timer = Callable[[], float]
Times = dict[str, list[float]]


def parser(description: str | None, repeats: int) -> argparse.ArgumentParser:
    """The options of every benchmark: --threads, --device, --repeats, --json."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--threads", type=int, default=torch.get_num_threads())
    result.add_argument("--device", default="cpu")
    result.add_argument("--repeats", type=int, default=repeats, help="turns that count, of each rival one")
    result.add_argument("--json", type=Path, help="where to write the figures, beside printing the table")
    return result


def timer(call: Callable[[], Any], device: str, runs: int = 1) -> Timer:
    """Times `runs` calls in a row; on a GPU between two events, the first of which an idle device takes at once."""
    return (lambda: on_cpu(call, runs)) if device == "cpu" else (lambda: on_gpu(call, runs))


def on_cpu(call: Callable[[], Any], runs: int) -> float:
    """Microseconds of one of `runs` calls in a row."""
    start = time.perf_counter()
    for _ in range(runs):
        call()
    return (time.perf_counter() - start) * 1e6 / runs


def on_gpu(call: Callable[[], Any], runs: int) -> float:
    """Microseconds of one of `runs` calls in a row, until the device is done with the last: its time or the host's,
    whichever is longer.
    """
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(runs):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / runs


def until_return(call: Callable[[], Any], device: str) -> float:
    """Microseconds until a call returns, the device idle before: what it keeps the host for. On a CPU, all of it."""
    if device != "cpu":
        torch.cuda.synchronize()
    return on_cpu(call, 1)


def rotating(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """A call of the next of `calls` each time. On buffers that together exceed a cache, each finds it cold."""
    following = cycle(calls)
    return lambda: next(following)()


def syncs(call: Callable[[], Any], device: str) -> int | None:
    """How often a call waits for the GPU, as torch's own detector sees it. None on a CPU."""
    if device == "cpu":
        return None
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("called a synchronizing CUDA operation" in str(warning.message) for warning in caught)


def memory_gb(device: str) -> float | None:
    """The most that torch's allocator has given out since this was last asked, in 10^9 bytes. None on a CPU."""
    if device == "cpu":
        return None
    most = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return most / 1e9


def most_bytes(call: Callable[[], Any], mark: str) -> int:
    """Of the bytes that `call` has torch's allocator give out, the most at a time in its last block of that name.

    The block is one of `torch.profiler.record_function(mark)`.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()
    last = max((event for event in events if event.name() == mark), key=lambda event: event.start_ns())
    memory = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    before = sum(size for time, size in memory if time < last.start_ns())
    during = [size for time, size in memory if last.start_ns() <= time <= last.end_ns()]
    return max(accumulate(during, initial=before))


def launches(call: Callable[[], Any], device: str) -> int | None:
    """How many kernels a call launches, as torch's profiler sees it; None on a CPU and where it sees none."""
    if device == "cpu":
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with warnings.catch_warnings(), torch.profiler.profile(activities=activities) as profile:
        warnings.simplefilter("ignore")
        call()
        torch.cuda.synchronize()
    events = profile.profiler.kineto_results.events()
    return sum("LaunchKernel" in event.name() for event in events) or None


def need_kernels(device: str) -> None:
    """Exit where `device` is a GPU that torch does not see, or that the extension has no kernels for."""
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here")
    if "amp_patch._C is built for cpu, cuda" not in multi_tensor.backend_reason():
        raise SystemExit(f"the kernels are not built for CUDA: {multi_tensor.backend_reason()}")


def in_turns(timers: Mapping[str, Timer], repeats: int, warmup: int = 2) -> Times:
    """{rival: its microseconds, turn by turn}. `warmup` turns before these are for caches, pools and code."""
    times: Times = {name: [] for name in timers}
    names = list(timers)
    for turn in range(warmup + repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            microseconds = timers[name]()
            if turn >= warmup:
                times[name].append(microseconds)
    return times


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Ours over theirs: the median of the turns' ratios. Below 1 ours is faster."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def about(options: argparse.Namespace) -> dict[str, Any]:
    """What a figure depends on: machine, torch, backend of the kernels, and the options it was measured with."""
    return {
        "machine": device_name(options.device),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "backend": multi_tensor.backend(),
        **{name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
    }


def device_name(device: str) -> str:
    """The model name of the GPU, or of the CPU as the system gives it."""
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def heading(options: argparse.Namespace) -> str:
    """The line above a table."""
    what = about(options)
    return (
        f"{what['machine']}, {what['device']}, {what['threads']} of {what['cores']} threads; torch {what['torch']}; "
        f"kernels: {what['backend']}; medians of {what['repeats']} turns"
    )


def line(cells: Sequence[Any], widths: Mapping[str, int]) -> str:
    """One row of a table. `widths` names the columns: numbers, with two digits, to the right; text, negative, left.

    None, what cannot be measured here, is a hyphen.
    """
    texts = ("-" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells)
    return "".join(f"{text:<{-w}}" if w < 0 else f"{text:>{w}}" for text, w in zip(texts, widths.values(), strict=True))


def write_json(options: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> None:
    """`about` and the rows so far, to --json where it was given: a benchmark that is stopped leaves what it has."""
    if options.json is None:
        return
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({**about(options), "rows": list(rows)}, indent=1) + "\n")

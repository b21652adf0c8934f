"""Functions that the benchmarks share: timers, turns of rivals, ratios, tables, and JSON that names the machine.

A turn times each rival once, in an order that rotates from turn to turn, so that other work on the machine slows all of
them. Rivals are compared turn by turn: a ratio is the median of the turns' ratios, so that changes of the machine's
load between turns do not affect it. Absolute times depend on the machine, and are not promised anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

import torch

from amp_patch import amp, multi_tensor

# Runs its subject once (or a few times) and returns the microseconds of one run.
Timer = Callable[[], float]
Times = dict[str, list[float]]


def parser(description: str | None, repeats: int) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark: --threads, --device, --repeats, --json."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--threads", type=int, default=torch.get_num_threads())
    result.add_argument("--device", default="cpu")
    result.add_argument("--repeats", type=int, default=repeats, help="turns that count, of each rival one")
    result.add_argument("--json", type=Path, help="where to write the figures, beside printing the table")
    return result


def timer(call: Callable[[], Any], device: str, runs: int = 1) -> Timer:
    """Return a timer of `runs` calls in a row: `on_cpu`, or on a GPU `on_gpu`."""
    return (lambda: on_cpu(call, runs)) if device == "cpu" else (lambda: on_gpu(call, runs))


def on_cpu(call: Callable[[], Any], runs: int) -> float:
    """Time `runs` calls in a row, and return the microseconds of one."""
    start = time.perf_counter()
    for _ in range(runs):
        call()
    return (time.perf_counter() - start) * 1e6 / runs


def on_gpu(call: Callable[[], Any], runs: int) -> float:
    """Time `runs` calls in a row until the device has finished the last one, and return the microseconds of one.

    The device is idle before. The result is the device's time or the host's, whichever is longer.
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
    """Return the microseconds until a call returns, with the device idle before. On a GPU this is the host's time."""
    if device != "cpu":
        torch.cuda.synchronize()
    return on_cpu(call, 1)


def rotating(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """Return a function that calls the next of `calls` each time.

    If the calls use different buffers, which together exceed a cache, no call finds its buffers in the cache.
    """
    following = cycle(calls)
    return lambda: next(following)()


def syncs(call: Callable[[], Any], device: str) -> int | None:
    """Return how often a call waits for the GPU, as counted by torch's sync debug mode; None on a CPU."""
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
    """Return the peak of torch's allocated memory since the last call, in 10^9 bytes; None on a CPU."""
    if device == "cpu":
        return None
    most = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return most / 1e9


def most_bytes(call: Callable[[], Any], mark: str) -> int:
    """Run `call`, and return the peak of its allocated bytes within the last `torch.profiler.record_function(mark)`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = profile.profiler.kineto_results.events()
    last = max((event for event in events if event.name() == mark), key=lambda event: event.start_ns())
    memory = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    before = sum(size for time, size in memory if time < last.start_ns())
    during = [size for time, size in memory if last.start_ns() <= time <= last.end_ns()]
    return max(accumulate(during, initial=before))


def launches(call: Callable[[], Any], device: str) -> int | None:
    """Return how many kernels a call launches, as torch's profiler counts them; None on a CPU, or if it counts none."""
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
    """Exit if `device` is a GPU that torch does not see, or for which the extension has no kernels."""
    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here")
    if "amp_patch._C is built for cpu, cuda" not in multi_tensor.backend_reason():
        raise SystemExit(f"the kernels are not built for CUDA: {multi_tensor.backend_reason()}")


def in_turns(timers: Mapping[str, Timer], repeats: int, warmup: int = 2) -> Times:
    """Time the rivals in turns. Return rival -> its microseconds, turn by turn, without the first `warmup` turns."""
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
    """Return ours over theirs, the median of the turns' ratios. Below 1, ours is faster."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def about(options: argparse.Namespace) -> dict[str, Any]:
    """Return the conditions of a measurement: machine, torch, backend of the kernels, and the options."""
    return {
        "machine": device_name(options.device),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "backend": multi_tensor.backend(),
        **{name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
    }


def device_name(device: str) -> str:
    """Return the model name of the GPU, or the system's name of the CPU."""
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def heading(options: argparse.Namespace) -> str:
    """Return the line above a table."""
    what = about(options)
    return (
        f"{what['machine']}, {what['device']}, {what['threads']} of {what['cores']} threads; torch {what['torch']}; "
        f"kernels: {what['backend']}; medians of {what['repeats']} turns"
    )


def line(cells: Sequence[Any], widths: Mapping[str, int]) -> str:
    """Format one row of a table. A float has two decimals, and None, a figure that cannot be measured, is a hyphen.

    Args:
        widths: name of a column -> its width. A column is aligned to the right, or, if its width is negative, left.
    """
    texts = ("-" if cell is None else f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells)
    return "".join(f"{text:<{-w}}" if w < 0 else f"{text:>{w}}" for text, w in zip(texts, widths.values(), strict=True))


def write_json(options: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> None:
    """If --json was given, write `about` and the rows so far. A benchmark that is stopped leaves these rows."""
    if options.json is None:
        return
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({**about(options), "rows": list(rows)}, indent=1) + "\n")


def measure(options: argparse.Namespace, widths: Mapping[str, int], rows: Iterable[Mapping[str, Any]]) -> None:
    """Print a table, each row when it is measured, and write the rows so far; restore what `initialize` replaced.

    Args:
        rows: an iterator that measures a row when it is asked for one. The first columns are those of `widths`.
    """
    torch.set_num_threads(options.threads)
    print(heading(options))
    print(line(list(widths), widths))
    done: list[Mapping[str, Any]] = []
    for row in rows:
        done.append(row)
        print(line(list(row.values())[: len(widths)], widths), flush=True)
        write_json(options, done)
        amp.restore()

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
from collections.abc import Callable, Mapping, Sequence
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
    """Times `runs` calls in a row; on a GPU until the device is done with the last."""

    def run() -> float:
        start = time.perf_counter()
        for _ in range(runs):
            call()
        if device != "cpu":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e6 / runs

    return run


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
    """One row of a table. `widths` names the columns: numbers, with two digits, to the right; text, negative, left."""
    texts = (f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells)
    return "".join(f"{text:<{-w}}" if w < 0 else f"{text:>{w}}" for text, w in zip(texts, widths.values(), strict=True))


def write_json(options: argparse.Namespace, rows: Sequence[Mapping[str, Any]]) -> None:
    """`about` and the rows, to --json where it was given."""
    if options.json is None:
        return
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({**about(options), "rows": list(rows)}, indent=1) + "\n")

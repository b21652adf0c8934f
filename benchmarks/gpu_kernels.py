"""The kernels on a GPU: their share of its copy rate, beside torch's, and what telling a launch of its tensors costs.

Device times are between two CUDA events around a row of calls, rivals in turns, medians. `of copy` is bytes read and
written a second over what a device-to-device copy of 1 GB reaches in the same run; `of torch` is our time over torch's.
Host times are from the call to its return, with the device idle.
`python benchmarks/gpu_kernels.py [--megabytes N] [--repeats N] [--json PATH]`
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amp_patch import multi_tensor as mt

ROUTES = ("auto", "arguments", "buffer")
COUNTS = (10, 74, 200, 600, 1000, 2000, 4000)


def split(elements: int, kind: str) -> list[int]:
    """The sizes of tensors of so many elements together."""
    if kind == "one":
        return [elements]
    if kind == "4,000 alike":
        return [elements // 4000] * 4000
    unit = elements // (12 * 12 + 40)  # a GPT's: 12 blocks of four matrices and their vectors, and the embeddings
    block = [3 * unit, 768 * 3, unit, 768, 4 * unit, 768 * 4, 4 * unit, 768]
    return [*block * 12, 39 * unit]


def work(sizes: list[int], low: torch.dtype) -> dict[str, tuple[int, Callable[[], Any], Callable[[], Any]]]:
    """{kernel: (bytes read and written per element, ours, torch's)}; factors are 1: repeating changes nothing."""
    half = [torch.randn(size, device="cuda").to(low) for size in sizes]
    wide = [t.float() for t in half]
    one, found = torch.ones((), device="cuda"), torch.zeros((), device="cuda")

    def check(tensors: list[Tensor]) -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, one)

    def cast_and_check() -> None:
        torch._foreach_copy_(wide, half)
        check(wide)

    def accumulate() -> None:
        torch._foreach_add_(wide, [t.float() for t in half], alpha=0.0)
        check(wide)

    def norm(tensors: list[Tensor]) -> Tensor:
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)))

    def unscale_and_norm() -> None:
        check(half)
        norm(half)

    return {
        "cast+unscale+check": (6, lambda: mt.multi_tensor_scale(half, wide, one, found), cast_and_check),
        "publish": (6, lambda: mt.multi_tensor_scale(wide, half, 1.0), lambda: torch._foreach_copy_(half, wide)),
        "unscale": (4, lambda: mt.multi_tensor_unscale(half, one, found), lambda: check(half)),
        "unscale fp32": (8, lambda: mt.multi_tensor_unscale(wide, one, found), lambda: check(wide)),
        "accumulate": (10, lambda: mt.multi_tensor_axpby(0.0, half, 1.0, wide, wide, found), accumulate),
        "check_finite": (2, lambda: mt.multi_tensor_check_finite(half, found), lambda: check(half)),
        "l2norm": (2, lambda: mt.multi_tensor_l2norm(half), lambda: norm(half)),
        "l2norm fp32": (4, lambda: mt.multi_tensor_l2norm(wide), lambda: norm(wide)),
        "unscale_l2norm": (4, lambda: mt.multi_tensor_unscale_l2norm(half, one, found), unscale_and_norm),
    }


def device_us(call: Callable[[], Any], runs: int = 5) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(runs):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / runs


def host_us(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def in_turns(
    calls: dict[str, Callable[[], Any]], repeats: int, clock: Callable[[Callable[[], Any]], float]
) -> dict[str, float]:
    """{name: median microseconds}; two turns before those that count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 2):
        for name, call in calls.items():
            microseconds = clock(call)
            if turn >= 2:
                times[name].append(microseconds)
    return {name: statistics.median(values) for name, values in times.items()}


def copy_rate(repeats: int) -> float:
    """Bytes a second that a device-to-device copy of 1 GB reads and writes."""
    source = torch.empty(2**28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / in_turns({"copy": lambda: target.copy_(source)}, repeats, device_us)["copy"] * 1e6


def measure_kernels(elements: int, repeats: int, rate: float) -> list[dict[str, Any]]:
    rows = []
    print(f"\n{'kernel':20}{'dtype':10}{'tensors':14}{'us':>10}{'of copy':>9}{'of torch':>10}")
    for low in (torch.float16, torch.bfloat16):
        for kind in ("one", "gpt", "4,000 alike"):
            sizes = split(elements, kind)
            for kernel, (width, ours, theirs) in work(sizes, low).items():
                times = in_turns({"ours": ours, "torch": theirs}, repeats, device_us)
                share = width * sum(sizes) / times["ours"] * 1e6 / rate
                ratio = times["ours"] / times["torch"]
                name = str(low).removeprefix("torch.")
                print(f"{kernel:20}{name:10}{kind:14}{times['ours']:10.1f}{share:9.2f}{ratio:10.2f}", flush=True)
                rows.append(
                    {"kernel": kernel, "dtype": name, "tensors": kind, "us": times["ours"], "of_copy": share}
                    | {"of_torch": ratio}
                )
            torch.cuda.empty_cache()
    return rows


def measure_routes(repeats: int) -> list[dict[str, Any]]:
    """How a launch learns of its tensors: as arguments, or by a buffer that is copied first."""
    from amp_patch import _C

    rows = []
    print(f"\n{'tensors of 256':16}{'route':12}{'host us':>10}{'device us':>11}")
    for count in COUNTS:
        low = [torch.ones(256, device="cuda", dtype=torch.float16) for _ in range(count)]
        wide, found = [t.float() for t in low], torch.zeros((), device="cuda")

        def by(route: str, low: list[Tensor] = low, wide: list[Tensor] = wide, found: Tensor = found) -> None:
            _C.cuda_metadata(route)
            mt.multi_tensor_scale(low, wide, 1.0, found)

        calls = {route: (lambda route=route: by(route)) for route in ROUTES}
        host, device = in_turns(calls, repeats, host_us), in_turns(calls, repeats, device_us)
        _C.cuda_metadata("auto")
        for route in ROUTES:
            print(f"{count:<16}{route:12}{host[route]:10.1f}{device[route]:11.1f}", flush=True)
            rows.append({"tensors": count, "route": route, "host_us": host[route], "device_us": device[route]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024, help="of the FP32 tensors of a list together")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu_kernels.py: torch sees no GPU here")
    if "amp_patch._C is built for cpu, cuda" not in mt.backend_reason():
        sys.exit(f"benchmarks/gpu_kernels.py: the kernels are not built for CUDA: {mt.backend_reason()}")
    torch.manual_seed(0)
    rate = copy_rate(options.repeats)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copies at {rate / 1e12:.2f} TB/s")
    kernels = measure_kernels(options.megabytes * 2**20 // 4, options.repeats, rate)
    result = {"copy_bytes_per_s": rate, "kernels": kernels, "routes": measure_routes(options.repeats)}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What telling a CUDA launch of its tensors costs: as kernel arguments, or by a buffer that is copied first.

Host times are from the call to its return with the device idle, device times between two CUDA events around a row of
calls; routes in turns, medians. `python benchmarks/launches.py [--repeats N] [--json PATH]`
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import timing
import torch
from torch import Tensor

from amp_patch import multi_tensor as mt

ROUTES = ("auto", "arguments", "buffer")
COUNTS = (10, 74, 200, 600, 1000, 2000, 4000)
WIDTHS = {"tensors of 256": -16, "route": -12, "host us": 10, "device us": 11}


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


def calls_of(count: int) -> dict[str, Callable[[], Any]]:
    low = [torch.ones(256, device="cuda", dtype=torch.float16) for _ in range(count)]
    wide, found = [t.float() for t in low], torch.zeros((), device="cuda")

    def by(route: str, low: list[Tensor] = low, wide: list[Tensor] = wide) -> None:
        mt.extension().cuda_metadata(route)
        mt.multi_tensor_scale(low, wide, 1.0, found)

    return {route: (lambda route=route: by(route)) for route in ROUTES}


def main() -> None:
    options = timing.parser(__doc__, repeats=15).parse_args()
    options.device = "cuda"
    if not torch.cuda.is_available():
        sys.exit("benchmarks/launches.py: torch sees no GPU here")
    if "amp_patch._C is built for cpu, cuda" not in mt.backend_reason():
        sys.exit(f"benchmarks/launches.py: the kernels are not built for CUDA: {mt.backend_reason()}")
    print(timing.heading(options))
    print(timing.line(list(WIDTHS), WIDTHS))
    rows = []
    for count in COUNTS:
        calls = calls_of(count)
        host, device = (
            timing.in_turns({route: lambda c=call, k=clock: k(c) for route, call in calls.items()}, options.repeats)
            for clock in (host_us, device_us)
        )
        for route in ROUTES:
            figures = [round(statistics.median(times[route]), 1) for times in (host, device)]
            rows.append(dict(zip(WIDTHS, [count, route, *figures], strict=True)))
            print(timing.line([*rows[-1].values()], WIDTHS), flush=True)
    mt.extension().cuda_metadata("auto")
    timing.write_json(options, rows)


if __name__ == "__main__":
    main()

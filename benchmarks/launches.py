"""Time the two routes by which a CUDA launch gets its list of tensors: kernel arguments, or a buffer that is copied.

A host time is the time until a call returns, with the device idle before. A device time is the time between two CUDA
events around five calls. The routes are timed in turns; the table has medians.
`python benchmarks/launches.py [--repeats N] [--json PATH]`
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import timing
import torch
from torch import Tensor

from amp_patch import multi_tensor as mt

ROUTES = ("auto", "arguments", "buffer")
COUNTS = (10, 74, 200, 600, 1000, 2000, 4000)
WIDTHS = {"tensors of 256": -16, "route": -12, "host us": 10, "device us": 11}


def until_return(call: Callable[[], Any]) -> timing.Timer:
    return lambda: timing.until_return(call, "cuda")


def five_in_a_row(call: Callable[[], Any]) -> timing.Timer:
    return timing.timer(call, "cuda", runs=5)


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
    timing.need_kernels("cuda")
    print(timing.heading(options))
    print(timing.line(list(WIDTHS), WIDTHS))
    rows = []
    for count in COUNTS:
        calls = calls_of(count)
        host, device = (
            timing.in_turns({route: clock(call) for route, call in calls.items()}, options.repeats)
            for clock in (until_return, five_in_a_row)
        )
        for route in ROUTES:
            figures = [round(statistics.median(times[route]), 1) for times in (host, device)]
            rows.append(dict(zip(WIDTHS, [count, route, *figures], strict=True)))
            print(timing.line([*rows[-1].values()], WIDTHS), flush=True)
        timing.write_json(options, rows)
    mt.extension().cuda_metadata("auto")


if __name__ == "__main__":
    main()

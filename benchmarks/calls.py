"""Measure the time that a patched function adds to a call, and the time that torch.autocast adds.

One table has calls that cast nothing, the other calls that cast. Tensors are tiny, so that the overhead of the call
dominates. Each round times all variants one after the other. The tables have medians over the rounds of the differences
to the plain call, in nanoseconds a call. The thread's CPU time is measured, which excludes other work on the machine.
With AMP_PATCH_BACKEND=torch in the environment it measures the wrappers in Python.
`python benchmarks/calls.py [--repeats N] [--calls N] [--json PATH]`
"""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import timing
import torch

from amp_patch.casts import install, regions
from amp_patch.casts import wrappers as cast_wrappers
from amp_patch.policy import Policy

LOW = torch.bfloat16
POLICY = Policy("O1", dtype=LOW, patch_torch_functions=True)

torch.manual_seed(0)
full = {"x": torch.randn(8, 8), "y": torch.randn(8, 8), "v": torch.rand(8), "image": torch.randn(1, 2, 4, 4)}
NAMES: dict[str, Any] = {
    "torch": torch,
    "F": torch.nn.functional,
    **full,
    **{f"low_{name}": tensor.to(LOW) for name, tensor in full.items()},
    "grad_x": torch.randn(8, 8, requires_grad=True) * 1,
    "grad_y": torch.randn(8, 8, requires_grad=True) * 1,
    "low_grad_x": (torch.randn(8, 8, requires_grad=True) * 1).to(LOW),
    "low_grad_y": (torch.randn(8, 8, requires_grad=True) * 1).to(LOW),
    "weight": torch.nn.Parameter(torch.randn(8, 8)),
    "kernel": torch.nn.Parameter(torch.randn(2, 2, 3, 3)),
    "low_weight": torch.nn.Parameter(torch.randn(8, 8).to(LOW)),
    "low_kernel": torch.nn.Parameter(torch.randn(2, 2, 3, 3).to(LOW)),
}

NOTHING_CAST = [
    "torch.exp(v)",
    "v.exp()",
    "v ** 2",
    "F.softmax(v, dim=0)",
    "F.layer_norm(v, (8,))",
    "low_x @ low_y",
    "F.linear(low_x, low_y)",
    "torch.atan2(v, v)",
    "x[0] = 1.0",
    "torch.add(v, v)",  # on no list
]
CAST = {  # call at O1 -> (the same call on operands that need no cast, the call to time under autocast)
    "x @ y": ("low_x @ low_y", "x @ y"),
    "torch.mm(x, y)": ("torch.mm(low_x, low_y)", "torch.mm(x, y)"),
    "grad_x @ grad_y": ("low_grad_x @ low_grad_y", "grad_x @ grad_y"),
    "F.linear(x, weight)": ("F.linear(low_x, low_weight)", "F.linear(x, weight)"),
    "F.linear(grad_x, weight)": ("F.linear(low_grad_x, low_weight)", "F.linear(grad_x, weight)"),
    "F.linear(low_x, weight)": ("F.linear(low_x, low_weight)", "F.linear(low_x, weight)"),
    "F.conv2d(image, kernel)": ("F.conv2d(low_image, low_kernel)", "F.conv2d(image, kernel)"),
    # On a CPU torch.autocast does not cast these, so its call has explicit casts.
    "torch.exp(low_v)": ("torch.exp(v)", "torch.exp(low_v.float())"),
    "F.layer_norm(low_v, (8,))": ("F.layer_norm(v, (8,))", "F.layer_norm(low_v.float(), (8,))"),
    "torch.dot(low_v, v)": ("torch.dot(v, v)", "torch.dot(low_v.float(), v)"),
}


@contextmanager
def patched(inside: bool) -> Any:
    install.install()
    try:
        with regions.region(POLICY) if inside else nullcontext():
            yield
    finally:
        install.uninstall()


VARIANTS: dict[str, Callable[[], AbstractContextManager]] = {
    "plain": nullcontext,
    "autocast": lambda: torch.autocast("cpu", dtype=LOW),
    "outside": lambda: patched(inside=False),
    "inside": lambda: patched(inside=True),
}


def clock(variant: str, statement: str, calls: int) -> timing.Timer:
    """Return a timer of the statement, in nanoseconds a call, in the context of the variant."""

    def run() -> float:
        with VARIANTS[variant]():
            timer = timeit.Timer(statement, timer=time.thread_time, globals=NAMES)
            timer.timeit(calls // 10 + 1)  # warm-up: the interpreter specializes the loop, and weights are cast once
            return timer.timeit(calls) / calls * 1e9

    return run


def added(times: timing.Times, variant: str) -> float:
    return statistics.median(a - b for a, b in zip(times[variant], times["plain"], strict=True))


def main() -> None:
    parser = timing.parser(__doc__, repeats=41)
    parser.set_defaults(threads=1)
    parser.add_argument("--calls", type=int, default=1000, help="in a turn")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []

    def measure(statements: dict[str, str]) -> timing.Times:
        clocks = {variant: clock(variant, statement, options.calls) for variant, statement in statements.items()}
        return timing.in_turns(clocks, options.repeats, warmup=1)

    def show(row: dict[str, Any]) -> None:
        print(timing.line([value if value is not None else "-" for value in row.values()], widths), flush=True)
        rows.append(row)

    print(f"{timing.heading(options)}; {cast_wrappers.backend()} wrappers; ns a call")
    widths = {"nothing is cast: added by": -27, "plain": 10, "autocast": 10, "outside": 10, "inside": 10}
    print("\n" + timing.line(list(widths), widths))
    for call in NOTHING_CAST:
        times = measure(dict.fromkeys(VARIANTS, call))
        others = {f"{variant} adds": round(added(times, variant)) for variant in VARIANTS if variant != "plain"}
        show({"call": call, "plain": round(statistics.median(times["plain"])), **others})

    widths = {"cast: added by": -27, "needless": 10, "autocast": 10, "inside": 10, "ratio": 10, "of calls": 10}
    print("\n" + timing.line(list(widths), widths))
    for call, (needless, rival) in CAST.items():
        times = measure({"plain": needless, "autocast": rival, "inside": call})
        plain, theirs, ours = statistics.median(times["plain"]), added(times, "autocast"), added(times, "inside")
        # If both find the cast weight in a cache, the added times are near 0, and their ratio says nothing.
        ratio = ours / theirs if theirs > 0.05 * plain else None
        row = {"call": call, "needless": round(plain), "autocast adds": round(theirs), "inside adds": round(ours)}
        show(row | {"added ratio": ratio, "call ratio": timing.ratio(times["inside"], times["autocast"])})
    timing.write_json(options, rows)


if __name__ == "__main__":
    main()

"""What a patched function adds to a call, beside what torch.autocast adds.

One table is of calls that cast nothing, one of calls that cast. Tensors are tiny, so that the call itself is what takes
the time. Every round times all variants one after the other and gives their differences; the table holds the medians
over the rounds, in nanoseconds a call. It is the thread's own time: what else runs on the machine is not in it.
`python benchmarks/calls.py [--threads N] [--rounds N] [--calls N] [--backend python] [--json PATH]`
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import timeit
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from amp_patch import casts
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
CAST = {  # the call -> (the same on operands that need no cast, the call that autocast gets)
    "x @ y": ("low_x @ low_y", "x @ y"),
    "torch.mm(x, y)": ("torch.mm(low_x, low_y)", "torch.mm(x, y)"),
    "grad_x @ grad_y": ("low_grad_x @ low_grad_y", "grad_x @ grad_y"),
    "F.linear(x, weight)": ("F.linear(low_x, low_weight)", "F.linear(x, weight)"),
    "F.linear(grad_x, weight)": ("F.linear(low_grad_x, low_weight)", "F.linear(grad_x, weight)"),
    "F.linear(low_x, weight)": ("F.linear(low_x, low_weight)", "F.linear(low_x, weight)"),
    "F.conv2d(image, kernel)": ("F.conv2d(low_image, low_kernel)", "F.conv2d(image, kernel)"),
    # On a CPU torch.autocast leaves these alone: the casts are written out.
    "torch.exp(low_v)": ("torch.exp(v)", "torch.exp(low_v.float())"),
    "F.layer_norm(low_v, (8,))": ("F.layer_norm(v, (8,))", "F.layer_norm(low_v.float(), (8,))"),
    "torch.dot(low_v, v)": ("torch.dot(v, v)", "torch.dot(low_v.float(), v)"),
}


@contextmanager
def patched(inside: bool) -> Any:
    casts.install()
    try:
        with casts.region(POLICY) if inside else nullcontext():
            yield
    finally:
        casts.uninstall()


VARIANTS: dict[str, Callable[[], AbstractContextManager]] = {
    "plain": nullcontext,
    "autocast": lambda: torch.autocast("cpu", dtype=LOW),
    "outside": lambda: patched(inside=False),
    "inside": lambda: patched(inside=True),
}


def measure(statements: dict[str, str], rounds: int, calls: int) -> dict[str, list[float]]:
    """Nanoseconds a call, round by round, of each variant's statement."""
    times: dict[str, list[float]] = {variant: [] for variant in statements}
    for _ in range(rounds):
        for variant, statement in statements.items():
            with VARIANTS[variant]():
                timer = timeit.Timer(statement, timer=time.thread_time, globals=NAMES)
                timer.timeit(calls // 10 + 1)  # the interpreter specializes the loop, the weights are cast
                times[variant].append(timer.timeit(calls) / calls * 1e9)
    return times


def added(times: dict[str, list[float]], variant: str, base: str = "plain") -> float:
    return statistics.median(a - b for a, b in zip(times[variant], times[base], strict=True))


def ratio(times: dict[str, list[float]], variant: str, base: str) -> float:
    return statistics.median(a / b for a, b in zip(times[variant], times[base], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--backend", choices=casts.BACKENDS, default=casts.backend())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    about = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    rows: list[dict[str, Any]] = []

    with casts.use_backend(options.backend):
        print(f"{options.backend} wrappers, torch {torch.__version__}, {options.threads} threads; ns a call, medians")
        print(f"\n{'nothing is cast: added by':27}{'plain':>9}{'autocast':>10}{'outside':>10}{'inside':>10}")
        for call in NOTHING_CAST:
            times = measure(dict.fromkeys(VARIANTS, call), options.rounds, options.calls)
            row = {"call": call, "plain_ns": statistics.median(times["plain"])}
            row |= {f"{variant}_adds_ns": added(times, variant) for variant in VARIANTS if variant != "plain"}
            _, plain, *others = row.values()
            print(f"{call:27}{plain:9.0f}" + "".join(f"{value:10.0f}" for value in others))
            rows.append(row)

        print(f"\n{'cast: added by':27}{'needless':>9}{'autocast':>10}{'inside':>10}{'ratio':>8}{'of calls':>10}")
        for call, (needless, rival) in CAST.items():
            statements = {"plain": needless, "autocast": rival, "inside": call}
            times = measure(statements, options.rounds, options.calls)
            row = {"call": call, "needless_ns": statistics.median(times["plain"])}
            row |= {f"{variant}_adds_ns": added(times, variant) for variant in ("autocast", "inside")}
            # A weight from the cache costs next to nothing on both sides: there is no ratio of that.
            some = row["autocast_adds_ns"] > 0.05 * row["needless_ns"]
            row["added_ratio"] = row["inside_adds_ns"] / row["autocast_adds_ns"] if some else None
            row["call_ratio"] = ratio(times, "inside", "autocast")
            shown = f"{row['added_ratio']:8.2f}" if some else f"{'-':>8}"
            print(
                f"{call:27}{row['needless_ns']:9.0f}{row['autocast_adds_ns']:10.0f}{row['inside_adds_ns']:10.0f}"
                f"{shown}{row['call_ratio']:10.2f}"
            )
            rows.append(row)
    if options.json:
        result = {**about, "backend": options.backend, "threads": options.threads, "rows": rows}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Measure the time and the peak memory of a training step with `gradient_release=True`, and without it.

Each row trains the GPT of benchmarks/step.py with and without gradient release, in turns: zero_grad, forward, loss,
backward, step, with torch.optim.AdamW(fused=True). `ratio` is the time of a step with gradient release over the time
without. `bytes` is the most that torch's allocator has given out at once in a step, per parameter: weights, masters,
optimizer state, gradients, and activations, which grow with the batch.

    python benchmarks/gradient_release.py [--size 12m|100m|tiny] [--batches 1 8] [--levels O5 O5+split O5+stochastic O4]
                                          [--threads N] [--device cuda] [--repeats N] [--json PATH]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import timing
import torch
import torch.nn.functional as F
from step import SIZES, STEPS, Sizes, subject

from amp_patch import amp
from amp_patch.environment import named_level

LEVELS = ("O5", "O5+split", "O5+stochastic", "O4")
WIDTHS = {"level": -15, "batch": 5, "without ms": 12, "with ms": 9, "ratio": 7, "bytes: without": 16, "with": 7}
TINY = {"tiny": Sizes(2, 192, 2, 32, 8, 4)}  # its larger weights are large enough to be released one by one


def training(level: str, sizes: Sizes, batch: int, device: str, release: bool) -> tuple[Callable[[], Any], int]:
    """Return a step as a user would write it, and the number of parameters that it trains."""
    model, inputs, targets = subject("gpt", sizes, batch, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    named = named_level(level)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=named.level, gradient_release=release, verbosity=0, **named.options
    )

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    return step, sum(param.numel() for param in model.parameters())


def bytes_in_a_step(level: str, sizes: Sizes, batch: int, device: str, release: bool) -> float:
    """Return the peak bytes per parameter in the second step, in which the optimizer has its state."""
    mark, counts = "a whole step", []

    def run() -> None:
        step, count = training(level, sizes, batch, device, release)
        counts.append(count)
        for _ in range(2):
            with torch.profiler.record_function(mark):
                step()

    return timing.most_bytes(run, mark) / counts[0]


def compare(level: str, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return one row: a level and a batch, with and without gradient release."""
    about = (level, (SIZES | TINY)[options.size], batch, options.device)
    held = {release: bytes_in_a_step(*about, release) for release in (False, True)}
    steps = {release: training(*about, release)[0] for release in (False, True)}
    timers = {str(release): timing.timer(step, options.device, STEPS) for release, step in steps.items()}
    times = timing.in_turns(timers, options.repeats)
    row: dict[str, Any] = {"level": level, "batch": batch}
    row |= {f"{name} ms": statistics.median(times[key]) / 1e3 for name, key in (("without", "False"), ("with", "True"))}
    row["ratio"] = timing.ratio(times["True"], times["False"])
    return row | {"bytes without": held[False], "bytes with": held[True]}


def main() -> None:
    parser = timing.parser(__doc__, repeats=7)
    parser.add_argument("--size", choices=[*SIZES, *TINY], default="12m", help="parameters of the GPT")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    options = parser.parse_args()
    timing.measure(
        options, WIDTHS, (compare(level, batch, options) for batch in options.batches for level in options.levels)
    )


if __name__ == "__main__":
    main()

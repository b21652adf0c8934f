"""Measure training steps with masters on the host (`master_device="cpu"`): time, bytes on the device, hidden copies.

Each row trains the GPT of benchmarks/step.py with torch.optim.AdamW: zero_grad, forward, loss, backward, step.
`ratio` is the time of a step over that of O5 with masters on the device. `held` is the bytes that the device has
allocated between two steps, and `peak` the most during a step, each per parameter. `copies ms` is the time to copy all
gradients to the host and all weights back, with nothing beside. `hidden` is the share of the time of the gradients'
copies that backward does not take longer. On a CPU no gradient is copied, and these columns are empty.

    python benchmarks/offload.py [--size 12m|100m|tiny] [--batch 8] [--threads N] [--device cuda] [--repeats N]
                                 [--json PATH]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import timing
import torch
import torch.nn.functional as F
from gradient_release import TINY
from step import SIZES, STEPS, subject

from amp_patch import amp

RIVALS: dict[str, dict[str, Any]] = {
    "O5": {},
    "O5+offload": {"master_device": "cpu"},
    "and gradient_release": {"master_device": "cpu", "gradient_release": True},
}
WIDTHS = {"rival": -21, "step ms": 9, "ratio": 7, "held": 6, "peak": 6, "backward ms": 12, "copies ms": 10, "hidden": 7}


class Subject:
    """A training of one rival; `step` is an iteration, and `backward` an iteration without the optimizer's step."""

    def __init__(self, rival: str, options: argparse.Namespace) -> None:
        self.device = options.device
        before = self.bytes()
        self.model, self.inputs, self.targets = subject(
            "gpt", (SIZES | TINY)[options.size], options.batch, options.device
        )
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        given = {"opt_level": "O5", "verbosity": 0, **RIVALS[rival]}
        self.model, self.optimizer = amp.initialize(self.model, optimizer, **given)
        self.count = sum(param.numel() for param in self.model.parameters())
        for _ in range(2):
            self.step()
        self.optimizer.zero_grad()
        self.held = None if before is None else (self.bytes() - before) / self.count
        if before is not None:
            torch.cuda.reset_peak_memory_stats()
            self.step()
            self.peak = (torch.cuda.max_memory_allocated() - before) / self.count
        else:
            self.peak = None

    def bytes(self) -> Any:
        """Return the bytes that torch has allocated on the device; None on a CPU."""
        return torch.cuda.memory_allocated() if self.device != "cpu" else None

    def backward(self) -> None:
        self.optimizer.zero_grad()
        with amp.scale_loss(F.cross_entropy(self.model(self.inputs), self.targets), self.optimizer) as scaled_loss:
            scaled_loss.backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def copies(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return two functions: copies of tensors as large as the gradients to the host, and back."""
        on_device = [param.detach() for param in self.model.parameters()]
        on_host = [torch.empty_like(param, device="cpu", pin_memory=True) for param in on_device]

        def down() -> None:
            for param, copied in zip(on_device, on_host, strict=True):
                copied.copy_(param, non_blocking=True)

        def up() -> None:
            for param, copied in zip(on_device, on_host, strict=True):
                param.copy_(copied, non_blocking=True)

        return down, up


def measured(rivals: list[str], call: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the milliseconds of `call` of each rival, turn by turn."""
    subjects = {rival: Subject(rival, options) for rival in rivals}
    timers = {rival: timing.timer(getattr(made, call), options.device, STEPS) for rival, made in subjects.items()}
    times = timing.in_turns(timers, options.repeats)
    amp.restore()
    return {rival: [each / 1e3 for each in turns] for rival, turns in times.items()}


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    steps = measured(list(RIVALS), "step", options)
    backwards = measured(["O5", "O5+offload"], "backward", options)
    copies: dict[str, float] = {}
    if options.device != "cpu":
        calls = dict(zip(("down", "up"), Subject("O5+offload", options).copies(), strict=True))
        timers = {name: timing.timer(call, options.device, STEPS) for name, call in calls.items()}
        turns = timing.in_turns(timers, options.repeats)
        copies = {name: statistics.median(times) / 1e3 for name, times in turns.items()}
        amp.restore()
    for rival in RIVALS:
        alone = Subject(rival, options)
        row: dict[str, Any] = {"rival": rival, "step ms": statistics.median(steps[rival])}
        row |= {"ratio": timing.ratio(steps[rival], steps["O5"]), "held": alone.held, "peak": alone.peak}
        backward = statistics.median(backwards[rival]) if rival in backwards else None
        row |= {"backward ms": backward, "copies ms": None, "hidden": None}
        if copies and rival == "O5+offload":
            longer = backward - statistics.median(backwards["O5"])
            row |= {"copies ms": sum(copies.values()), "hidden": 1 - longer / copies["down"]}
        yield row


def main() -> None:
    parser = timing.parser(__doc__, repeats=5)
    parser.add_argument("--size", choices=[*SIZES, *TINY], default="12m", help="parameters of the GPT")
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    timing.measure(options, WIDTHS, rows(options))


if __name__ == "__main__":
    main()

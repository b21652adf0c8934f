"""Measure memory and time of a step whose activations are saved in eight bits, beside its level without and O0.

Each row is a model at a level. `peak` is the most that torch's allocator has given out at once in forward and backward,
relative to O0; `+act8 over level` divides the CPU time of a step by that of the level alone. The rivals run in turns.

    python benchmarks/saved_activations.py [--levels O1 O2 O4 O5] [--threads N] [--device cuda] [--repeats N]
                                            [--json PATH]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timing
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_patch import amp

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import tasks

LEVELS = ("O1", "O2", "O4", "O5")
WIDTHS = {"model": -8, "level": -7, "peak over O0: level": 21, "+act8": 7, "time: +act8 over level": 24}


class Block(nn.Module):
    """Two convolutions with batch norms, and the input added, as in ResNet-18."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, 1, 1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.two(F.relu(self.norm1(self.one(x))))) + x)


def gpt() -> tuple[nn.Module, Tensor, Tensor]:
    tokens = torch.randint(128, (4, 257))
    return tasks.GPT(128, 256, width=256, heads=8, depth=4), tokens[:, :-1], tokens[:, 1:].reshape(-1)


def resnet() -> tuple[nn.Module, Tensor, Tensor]:
    stem = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    layers = [*stem, *(Block(32) for _ in range(4)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    return nn.Sequential(*layers), torch.randn(16, 3, 32, 32), torch.randint(10, (16,))


def step_of(make: Callable[[], tuple[nn.Module, Tensor, Tensor]], level: str, device: str) -> Callable[[], None]:
    """Return a function that makes forward, loss and backward at `level`."""
    torch.manual_seed(0)
    module, inputs, target = make()
    inputs, target = inputs.to(device), target.to(device)
    module = module.to(device)
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.0)
    model, optimizer = amp.initialize(module, optimizer, opt_level=level, verbosity=0)

    def step() -> None:
        logits = model(inputs)
        loss = F.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), target)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.zero_grad()

    return step


def peak(step: Callable[[], None]) -> int:
    """Return the most bytes in a second step."""

    def run() -> None:
        for _ in range(2):
            with torch.profiler.record_function("step"):
                step()

    return timing.most_bytes(run, "step")


def compare(name: str, level: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return one row: a model at a level."""
    make = {"GPT": gpt, "ResNet": resnet}[name]
    levels = ("O0", level, f"{level}+act8")
    held = {}
    for each in levels:
        held[each] = peak(step_of(make, each, options.device))
        amp.restore()
    steps = {each: step_of(make, each, options.device) for each in levels[1:]}
    times = timing.in_turns({key: timing.timer(step, options.device) for key, step in steps.items()}, options.repeats)
    amp.restore()
    share = [held[each] / held["O0"] for each in levels[1:]]
    return {
        "model": name, "level": level, "peak": share[0], "peak act8": share[1],
        "time": timing.ratio(times[levels[2]], times[level]),
    }  # fmt: skip


def main() -> None:
    parser = timing.parser(__doc__, repeats=7)
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    options = parser.parse_args()
    rows = (compare(name, level, options) for name in ("GPT", "ResNet") for level in options.levels)
    timing.measure(options, WIDTHS, rows)


if __name__ == "__main__":
    main()

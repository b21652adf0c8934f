"""Measure memory and time of a language model's head, `cross_entropy` and their backward, with and without FP32 logits.

Each row is a level with the loss outside or inside of the model. `copies` makes FP32 copies of the logits, as the level
did before `casts/lean_loss.py` and as torch.autocast does; `lean` is the level as it is; `torch` is torch's
low-precision kernel, which a cast model ran inside before and which rounds the loss. The rivals run in turns. `bytes`
is the most that torch's allocator has given out at once, per logit: head and gradients included.

    python benchmarks/loss.py [--tokens 1024] [--classes 16384] [--width 128] [--levels O1 O2 O4 O5]
                              [--cpu-half native|emulate|auto] [--threads N] [--device cuda] [--repeats N] [--json PATH]
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import Any

import timing
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_patch import amp
from amp_patch.casts import lean_loss
from amp_patch.policy import OPT_LEVELS

LEVELS = ("O1", "O2", "O4", "O5")
WIDTHS = {"level": -7, "loss": -9, "bytes: copies": 14, "lean": 7, "time: lean": 12, "torch": 8}


class Head(nn.Module):
    """The last layer of a language model, which may compute the loss itself."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, classes, bias=False)

    def forward(self, hidden: Tensor, target: Tensor | None, loss: Callable[..., Tensor]) -> Tensor:
        """Return the loss, or without `target` the logits."""
        logits: Tensor = self.head(hidden)
        return logits if target is None else loss(logits, target)


def step_of(level: str, inside: bool, options: argparse.Namespace) -> Callable[[str], None]:
    """Return a function that runs forward, loss and backward in the way of a rival."""
    torch.manual_seed(0)
    model: Any = Head(options.width, options.classes).to(options.device)
    hidden = torch.randn(options.tokens, options.width, device=options.device)
    target = torch.randint(options.classes, (options.tokens,), device=options.device)
    target[::7] = -100
    policy = OPT_LEVELS[level]
    low_outputs = policy.cast_model_type is not None and not inside
    model, optimizer = amp.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        opt_level=level,
        cpu_half=options.cpu_half,
        cast_model_outputs=policy.dtype if low_outputs else None,
        verbosity=0,
    )
    smallest = lean_loss.SMALLEST

    def step(rival: str) -> None:
        lean_loss.SMALLEST = options.tokens * options.classes + 1 if rival == "copies" else smallest
        loss = inspect.unwrap(F.cross_entropy) if rival == "torch" else F.cross_entropy
        found = model(hidden, target if inside else None, loss)
        if not inside:
            found = loss(found, target)
        with amp.scale_loss(found, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.zero_grad()
        lean_loss.SMALLEST = smallest

    return step


def peak(step: Callable[[str], None], rival: str, options: argparse.Namespace) -> float:
    """Return the peak bytes per logit in a second step."""

    def run() -> None:
        for _ in range(2):
            with torch.profiler.record_function("step"):
                step(rival)

    return timing.most_bytes(run, "step") / (options.tokens * options.classes)


def compare(level: str, inside: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Return one row: a level, with the loss outside or inside of the model."""
    step = step_of(level, inside, options)
    rivals = ["copies", "lean"]
    if inside and OPT_LEVELS[level].cast_model_type is not None:
        rivals.append("torch")
    held = [peak(step, rival, options) for rival in rivals[:2]]
    timers = {name: timing.timer(lambda name=name: step(name), options.device) for name in rivals}  # type: ignore[misc]
    times = timing.in_turns(timers, options.repeats)
    ratios = {name: timing.ratio(times[name], times["copies"]) for name in rivals[1:]}
    row: dict[str, Any] = {"level": level, "loss": "inside" if inside else "outside"}
    row |= {"bytes copies": held[0], "bytes lean": held[1]}
    return row | {"lean": ratios["lean"], "torch": ratios.get("torch")}


def main() -> None:
    parser = timing.parser(__doc__, repeats=7)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--classes", type=int, default=16384)
    parser.add_argument("--width", type=int, default=128, help="of the last hidden layer")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--cpu-half", choices=("auto", "emulate", "native"), default="auto")
    options = parser.parse_args()
    timing.measure(
        options, WIDTHS, (compare(level, inside, options) for level in options.levels for inside in (False, True))
    )


if __name__ == "__main__":
    main()

"""Measure the loss of accuracy without masters: a GPT from scratch and fine-tuned, at four shares of lost updates.

    python benchmarks/lost_updates.py [--repeats N] [--steps N] [--json PATH]     # some minutes on an idle machine

The GPT of examples/tasks.py learns Python's manual by AdamW. Four cases have learning rates from large to small. In
each, the meter of lost updates measures the share of updates that BF16 weights would lose without masters, and the
held-out loss shows the effect: with masters (O5), split masters, stochastic rounding, eight-bit state, and rounding to
nearest (O3 in BF16). Each is trained from several seeds (`--repeats`).
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import short_training
import timing
import torch

from amp_patch import amp
from amp_patch.environment import named_level

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from tasks import TopicsGPT

BASE = "O0"
LEVELS = ("O5", "O5+split", "O5+split+8bit", "O5+stochastic", "O5+stochastic+8bit", "O3")
TRAINED_STEPS = 800  # steps of FP32 training before a fine-tuning


class Case(NamedTuple):
    """A learning rate, and whether the training starts from a trained model."""

    lr: float
    fine_tuned: bool

    def __str__(self) -> str:
        return f"{'fine-tuned' if self.fine_tuned else 'from scratch'}, lr {self.lr:g}"


CASES = (Case(1e-2, False), Case(1e-3, False), Case(1e-4, False), Case(1e-4, True))


def train(case: Case, level: str, seed: int, steps: int, start: dict[str, Any] | None) -> tuple[float, float | None]:
    """Train, and return the held-out loss at the end and the share of updates that weights without masters would lose.

    Args:
        start: the weights that a fine-tuning begins with.
    """
    loss, run, _ = _trained(case.lr, level, seed, steps, start if case.fine_tuned else None)
    return loss, run.lost_updates()


def starting_weights(steps: int = TRAINED_STEPS) -> dict[str, Any]:
    """Return the weights that a fine-tuning begins with: trained in FP32, from a seed that no compared run has."""
    return _trained(4e-3, BASE, 1000, steps, None)[2].state_dict()


def _trained(lr: float, level: str, seed: int, steps: int, start: dict[str, Any] | None) -> tuple[float, Any, Any]:
    task = TopicsGPT("cpu")
    torch.manual_seed(seed)
    batches = torch.Generator().manual_seed(seed)
    model = task.model()
    if start is not None:
        model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    named = named_level(level)
    dtype = torch.bfloat16 if level == "O3" else None
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=named.level, dtype=dtype, verbosity=0, **named.options
    )
    with amp.record() as run:
        short_training.train(task, model, [optimizer], steps, batches)
    return short_training.figures(task, model)["held_out_loss"], run, model


def measure(case: Case, seeds: int, steps: int, start: dict[str, Any] | None) -> dict[str, Any]:
    """Return a row: the share of lost updates, O0's held-out losses, and each level's differences to them by seed."""
    found = {level: [train(case, level, seed, steps, start) for seed in range(seeds)] for level in (BASE, *LEVELS)}
    base = [loss for loss, _ in found[BASE]]
    row: dict[str, Any] = {"run": str(case), "lost": statistics.mean(share for _, share in found[BASE]), BASE: base}
    for level in LEVELS:
        row[level] = [loss - of_base for (loss, _), of_base in zip(found[level], base, strict=True)]
    return row


def main() -> None:
    parser = timing.parser(__doc__, repeats=3)
    parser.add_argument("--steps", type=int, default=400, help="of each training (default %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    start = starting_weights()
    heads = ["run", "lost", BASE, *LEVELS]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}", flush=True)
    rows = []
    for case in CASES:
        rows.append(row := measure(case, options.repeats, options.steps, start))
        cells = [row["run"], f"{row['lost']:.2f}", f"{statistics.mean(row[BASE]):.4f}"]
        cells += [f"{statistics.mean(row[level]):+.4f}" for level in LEVELS]
        print(f"| {' | '.join(cells)} |", flush=True)
    timing.write_json(options, rows)


if __name__ == "__main__":
    main()

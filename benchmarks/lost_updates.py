"""What is lost without masters: a GPT from scratch and fine-tuned, at four shares of lost updates.

    python benchmarks/lost_updates.py [--repeats N] [--steps N] [--json PATH]     # some minutes on an idle machine

The GPT of examples/tasks.py writes Python's manual, by AdamW. In four runs, from large steps to small ones, the meter
of lost updates tells which share of them BF16 weights would lose without masters, and the held-out loss what that
costs: with masters (O5), split ones, weights that are rounded by chance, with state in eight bits, and rounded to
nearest (O3 in BF16). Each is trained from as many seeds as there are repeats.
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
TRAINED_STEPS = 800  # of the model that is fine-tuned


class Case(NamedTuple):
    """A learning rate, and whether the model that it is for is a trained one."""

    lr: float
    fine_tuned: bool

    def __str__(self) -> str:
        return f"{'fine-tuned' if self.fine_tuned else 'from scratch'}, lr {self.lr:g}"


CASES = (Case(1e-2, False), Case(1e-3, False), Case(1e-4, False), Case(1e-4, True))


def train(case: Case, level: str, seed: int, steps: int, start: dict[str, Any] | None) -> tuple[float, float | None]:
    """The held-out loss at the end, and the share of updates that weights without masters would have lost.

    Args:
        start: the weights of the model that is fine-tuned.
    """
    loss, run, _ = _trained(case.lr, level, seed, steps, start if case.fine_tuned else None)
    return loss, run.lost_updates()


def starting_weights(steps: int = TRAINED_STEPS) -> dict[str, Any]:
    """Of a model that is fine-tuned: trained in FP32 from another seed than any that is compared."""
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
    """A row: the share that is lost, O0's held-out loss, and how far above it each level's mean lies."""
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

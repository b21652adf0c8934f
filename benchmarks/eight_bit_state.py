"""Train each optimizer of torch.optim with FP32 state and with optimizer_state="8bit": is accuracy lost?

    python benchmarks/eight_bit_state.py [--repeats N] [--steps N] [--only Adam NAdam] [--json PATH]    # ten minutes

Each optimizer trains digits and a GPT from several seeds (`--repeats`), at O0, so that only the state differs. A row
has the bytes of state per parameter in FP32 and in eight bits, the held-out losses of the seeds with FP32 state, and
the verdict on the mean loss with eight-bit state: `within` the range of these seeds, `better`, or how far outside.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

import short_training
import timing
import torch
from torch import nn

from amp_patch import amp
from amp_patch.storage.coder import stored

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from tasks import Digits, TopicsGPT

TASKS = {"digits": Digits, "gpt": TopicsGPT}
# Class -> its settings, with a learning rate at which it trains both tasks.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 0.1},
    "Adadelta": {"lr": 1.0},
    "Adafactor": {"lr": 0.02},
    "Adagrad": {"lr": 0.02},
    "Adam": {"lr": 2e-3},
    "Adam, amsgrad": {"lr": 2e-3, "amsgrad": True},
    "AdamW": {"lr": 2e-3, "weight_decay": 0.1},
    "Adamax": {"lr": 4e-3},
    "Muon": {"lr": 0.02},
    "NAdam": {"lr": 2e-3},
    "RAdam": {"lr": 4e-3},
    "RMSprop": {"lr": 1e-3},
    "Rprop": {"lr": 1e-4, "step_sizes": (1e-6, 1e-2)},
    "SGD": {"lr": 0.05, "momentum": 0.9},
}
AVAILABLE = [name for name in OPTIMIZERS if hasattr(torch.optim, name.partition(",")[0])]


def make(name: str, model: nn.Module) -> list[Any]:
    """Return the optimizers of a model: one, or for Muon, which takes only matrices, also AdamW for the others."""
    kind = getattr(torch.optim, name.partition(",")[0])
    if name != "Muon":
        return [kind(model.parameters(), **OPTIMIZERS[name])]
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [kind(matrices, **OPTIMIZERS[name]), torch.optim.AdamW(others, **OPTIMIZERS["AdamW"])]


def train(task_name: str, name: str, state: str | None, seed: int, steps: int) -> tuple[float, float]:
    """Train, and return the held-out loss at the end and the bytes of state per parameter."""
    task: Any = TASKS[task_name]("cpu")
    torch.manual_seed(seed)
    batches = torch.Generator().manual_seed(seed)
    model = task.model()
    optimizers = make(name, model)
    model, optimizers = amp.initialize(model, optimizers, opt_level="O0", optimizer_state=state, verbosity=0)
    short_training.train(task, model, optimizers, steps, batches)
    count = sum(p.numel() for p in model.parameters())
    taken = sum(bytes_of(state) for optimizer in optimizers for state in optimizer.state.values())
    found = short_training.figures(task, model)["held_out_loss"]
    amp.restore()
    return found, taken / count


def bytes_of(state: Any) -> int:
    return sum(tensor.nbytes for tensor in stored([state]))


def measure(task: str, name: str, seeds: int, steps: int) -> dict[str, Any]:
    """Return one row: an optimizer on a task, with FP32 state and with eight-bit state."""
    both = {state: [train(task, name, state, seed, steps) for seed in range(seeds)] for state in (None, "8bit")}
    fp32, coded = ([loss for loss, _ in found] for found in both.values())
    row: dict[str, Any] = {"task": task, "optimizer": name, "FP32": fp32, "8bit": coded}
    row |= {f"{kind} bytes": found[0][1] for kind, found in zip(("FP32", "8bit"), both.values(), strict=True)}
    return row | verdict(fp32, coded)


def verdict(fp32: list[float], coded: list[float]) -> dict[str, Any]:
    """By how much the mean in eight bits is outside of the range of FP32's seeds, and the word for it."""
    mean = statistics.mean(coded)
    outside = max(0.0, mean - max(fp32), min(fp32) - mean)
    return {"outside": outside, "verdict": "within" if not outside else "better" if mean < min(fp32) else "outside"}


def told(found: dict[str, Any]) -> str:
    """A verdict in words."""
    return found["verdict"] + (f" by {found['outside']:.4f}" if found["outside"] else "")


def cells(row: dict[str, Any]) -> list[str]:
    """Format a row for the table of the page."""
    low, high = min(row["FP32"]), max(row["FP32"])
    losses = [f"{statistics.mean(row['FP32']):.4f}", f"{low:.4f} to {high:.4f}", f"{statistics.mean(row['8bit']):.4f}"]
    return [row["task"], row["optimizer"], f"{row['FP32 bytes']:.2f}", f"{row['8bit bytes']:.2f}", *losses, told(row)]


HEADS = ["task", "optimizer", "state in FP32", "in 8 bits", "held-out loss, FP32", "of the seeds", "8 bits", "verdict"]


def main() -> None:
    parser = timing.parser(__doc__, repeats=3)
    parser.add_argument("--steps", type=int, default=300, help="of each training (default %(default)s)")
    parser.add_argument("--only", nargs="+", choices=AVAILABLE, default=AVAILABLE, metavar="NAME", help="%(choices)s")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}", flush=True)
    rows = []
    for task in TASKS:
        for name in options.only:
            rows.append(row := measure(task, name, options.repeats, options.steps))
            print(f"| {' | '.join(cells(row))} |", flush=True)
            timing.write_json(options, rows)


if __name__ == "__main__":
    main()

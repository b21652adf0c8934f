"""Time a training step of a small GPT with and without `amp.record`.

    python benchmarks/recording.py [--levels O0 O1 O2] [--dtype bf16|fp16] [--steps N] [--size small|12m|100m]
                                   [--batch N] [--threads N] [--device cuda] [--repeats N] [--json PATH]

The same training takes turns of steps: one turn without a recording, the next one recorded into a file, and so on. The
file is written within the turn. The cost of recording does not grow with the model, so the short steps of the small GPT
(that of examples/, with 0.1 million parameters) are the hardest case.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import step
import timing
import torch
import torch.nn.functional as F

from amp_patch import amp

SIZES = {"small": step.Sizes(2, 64, 4, 96, 32, 32), **step.SIZES}
COLUMNS = {"level": -7, "off, ms a step": 16, "recorded": 12, "ratio": 9}


def training(options: argparse.Namespace, level: str) -> Callable[[], None]:
    """Return the step of a new training."""
    model, inputs, targets = step.subject("gpt", SIZES[options.size], options.batch, options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    dtype = None if level in ("O0", "O4", "O5") else step.DTYPES[options.dtype]
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype=dtype, verbosity=0)

    def one() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    return one


def compare(options: argparse.Namespace, level: str, folder: Path) -> dict[str, Any]:
    """Return a row: the median times of a step without and with a recording, and their ratio."""
    off = timing.timer(training(options, level), options.device, options.steps)

    def recorded() -> float:
        with amp.record(folder / "run.jsonl") as run:
            microseconds = off()
        assert run.steps == options.steps
        return microseconds

    try:
        times = timing.in_turns({"off": off, "recorded": recorded}, options.repeats)
    finally:
        amp.restore()
    return {
        "level": level,
        "off": statistics.median(times["off"]) / 1e3,
        "recorded": statistics.median(times["recorded"]) / 1e3,
        "ratio": timing.ratio(times["recorded"], times["off"]),
    }


def main() -> None:
    parser = timing.parser(__doc__, repeats=20)
    parser.add_argument("--levels", nargs="+", choices=("O0", "O1", "O2", "O3", "O4", "O5"), default=("O0", "O1", "O2"))
    parser.add_argument("--dtype", choices=step.DTYPES, default="bf16", help="of O1 to O3")
    parser.add_argument("--steps", type=int, default=100, help="in a turn; what was recorded is written after every 50")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    print(f"{timing.heading(options)}; {options.size} GPT, batch {options.batch}")
    print(timing.line(list(COLUMNS), COLUMNS))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for level in options.levels:
            rows.append(row := compare(options, level, Path(folder)))
            cells = (level, row["off"], row["recorded"], f"{row['ratio']:.4f}")
            print(timing.line(cells, COLUMNS), flush=True)
    timing.write_json(options, rows)


if __name__ == "__main__":
    main()

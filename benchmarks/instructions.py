"""Count the instructions of the host in a training step, over those of torch.autocast with a GradScaler.

    python benchmarks/instructions.py [--steps N] [--json PATH]

The steps are those that road.py times. Valgrind's callgrind counts the instructions of a process with one thread; the
count of a process with a warm-up alone is subtracted. Other work on the machine does not change a count, but a count is
not a time. It takes some minutes, and Valgrind (https://valgrind.org).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from typing import Any

import road
import timing
import torch

COLUMNS = {"training": -16, "thousands": 10, "over autocast": 15}
STEPS: dict[str, Any] = {
    "autocast": road.autocast,
    **{name: partial(road.training, **options) for name, options in road.TIMED.items()},
}


def instructions(name: str, steps: int) -> float:
    """Return the instructions of one step, from a process with `steps` steps and a process with none."""
    many, none = (_counted(name, count) for count in (steps, 0))
    return (many - none) / steps


def _counted(name: str, steps: int) -> int:
    """Return the instructions of a process that makes a warm-up and `steps` steps."""
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable, __file__]
    environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--child", name, "--steps", str(steps)], capture_output=True, text=True, env=environment
    )
    if (found := re.search(r"Collected : (\d+)", done.stderr)) is None or done.returncode:
        raise RuntimeError(f"instructions.py: valgrind ended with status {done.returncode}: {done.stderr[-2000:]}")
    return int(found[1])


def main() -> None:
    parser = timing.parser(__doc__, repeats=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--child", choices=STEPS, help="make the steps of one training; the program runs itself so")
    options = parser.parse_args()
    if options.child is not None:
        torch.set_num_threads(1)
        step = STEPS[options.child]()
        for _ in range(road.WARM_UP + options.steps):
            step()
        return
    rows: list[dict[str, Any]] = []
    print(timing.heading(options))
    print(timing.line(list(COLUMNS), COLUMNS))
    for name in STEPS:
        found = instructions(name, options.steps)
        base = rows[0]["thousands"] if rows else found / 1000
        rows.append({"training": name, "thousands": found / 1000, "over autocast": found / 1000 / base})
        print(timing.line(tuple(rows[-1].values()), COLUMNS), flush=True)
    timing.write_json(options, rows)


if __name__ == "__main__":
    main()

"""A compiled training step of the small GPT: our levels beside torch.autocast with a GradScaler, compiled too.

    python benchmarks/compile.py [--dtype bf16|fp16] [--size 12m|100m] [--batches 8] [--threads N] [--device cuda]
                                 [--rivals ...] [--repeats N] [--json PATH]

The steps are those of step.py with `torch.compile(model)` in each; every rival has a process of its own, in turns.
"""

from __future__ import annotations

import argparse

import step
import timing

COLUMNS = {"batch": 5, "": 2, "rival": -17, "ms a step": 10, "ratio": 8, "first loss": 12}


def main() -> None:
    parser = timing.parser(__doc__, repeats=21)
    parser.add_argument("--dtype", choices=step.DTYPES, default="bf16")
    parser.add_argument("--size", choices=step.SIZES, default="12m", help="parameters of the GPT")
    parser.add_argument("--models", nargs="+", choices=("gpt", "convnet"), default=("gpt",))
    parser.add_argument("--batches", nargs="+", type=int, default=(4,))
    parser.add_argument("--rivals", nargs="+", choices=step.RIVALS, default=step.RIVALS)
    options: argparse.Namespace = parser.parse_args()
    if step.BASELINE not in options.rivals:
        parser.error(f"--rivals must name {step.BASELINE}: every ratio is over it")

    print(f"{timing.heading(options)}; ratios over {step.BASELINE}, {options.dtype}, all compiled")
    print(timing.line(list(COLUMNS), COLUMNS))
    rows = []
    for kind in options.models:
        for batch in options.batches:
            for row in step.compare(options, kind, batch, compiled=True):
                rows.append(row)
                cells = (batch, "", row["rival"], row["milliseconds"], row["ratio"], row["first_loss"])
                print(timing.line(cells, COLUMNS), flush=True)
    timing.write_json(options, rows)


if __name__ == "__main__":
    main()

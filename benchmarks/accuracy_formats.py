"""Train the three families of accuracy.py in each FP8 and FP4 format, and write docs/accuracy-formats.md.

`amp.compare` makes all hundred and twenty runs in this process, because their times do not matter.

    python benchmarks/accuracy_formats.py                                # ten minutes
    python benchmarks/accuracy_formats.py --from out/accuracy-formats    # the page again, from an earlier run's reports
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from pathlib import Path
from typing import Any

import short_training
import torch
from accuracy import FAMILIES, JUDGED, METRIC, ROOT, listed, read, seeds, table
from torch import nn

from amp_patch import amp
from amp_patch.comparison.comparison import Comparison
from amp_patch.diagnose.recording.run import dumps, loads
from amp_patch.policy import PRODUCT_FORMATS

LEVELS = ("O0", "O4", *(f"O6+{name}" for name in PRODUCT_FORMATS))
STEPS = {"digits": 200, "gpt": 300, "lstm": 100}
# Family -> which of its products are in FP8 or FP4, if the first layer and the head are kept in BF16.
ROUNDED = {
    "digits": "One linear layer of two is in the format: convolutions are BF16's, and the other is the head.",
    "gpt": "The eight linear layers of its blocks are in the format; attention's own products and the head are BF16's.",
    "lstm": "Nothing is in the format: an LSTM's products are BF16's, and its one linear layer is the head. So all "
    "formats give what O4 gives, to the bit.",
}

AFTER = 150  # steps in FP32 before gradients are compared
# Row of the table of gradient errors -> (level, options of `initialize`).
GRADIENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("O4", {}),
    **{name: ("O6", {"dtype": name, "keep_high": ()}) for name in PRODUCT_FORMATS},
    **{f"{name}, head in BF16": ("O6", {"dtype": name}) for name in ("nvfp4", "nvfp4_naive")},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help=f"of each training (default: {STEPS})")
    parser.add_argument("--out", type=Path, default=Path("out/accuracy-formats"), help="where the reports go")
    parser.add_argument("--from", dest="reports", type=Path, help="train nothing: take the reports from this folder")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where the page goes")
    args = parser.parse_args()
    for family in args.families if args.reports is None else []:
        compared = train(family, args.seeds, args.steps or STEPS[family])
        (args.out / family).mkdir(parents=True, exist_ok=True)
        (args.out / family / "report.json").write_text(dumps(compared.to_dict()))
    if args.reports is None:
        errors = gradient_errors(tasks()["gpt"]("cpu"), args.seeds, AFTER)
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "gradients.json").write_text(dumps(errors))
    folder = args.reports or args.out
    args.docs.mkdir(parents=True, exist_ok=True)
    path = args.docs / "accuracy-formats.md"
    path.write_text(
        page(
            {family: read(folder / family / "report.json") for family in args.families},
            loads((folder / "gradients.json").read_text()),
        )
    )
    print(f"The page: {path}")
    return 0


def tasks() -> dict[str, Any]:
    """Return the tasks of examples/train.py by name."""
    sys.path.insert(0, str(ROOT / "examples"))
    from tasks import TASKS

    return TASKS


def train(family: str, seeds: int, steps: int) -> Comparison:
    """Train the task of a family at each level from each seed."""
    task = tasks()[family]("cpu")

    def run() -> None:
        torch.manual_seed(0)  # `compare` adds a number to it, another one for each seed
        batches = torch.Generator().manual_seed(torch.initial_seed())
        model = task.model()
        model, optimizer = amp.initialize(model, task.optimizer(model), verbosity=0)
        short_training.train(task, model, [optimizer], steps, batches)
        amp.log(**short_training.figures(task, model))

    return amp.compare(run, list(LEVELS), seeds=seeds, metric=METRIC)


def gradient_errors(task: Any, seeds: int, steps: int, batches: int = 16) -> dict[str, list[float]]:
    """Return row of `GRADIENTS` -> the relative error of a gradient for each seed: |g - g32| / |g32|.

    The weights come from `steps` steps in FP32. The error is the mean over several batches of the training data.
    """
    errors: dict[str, list[float]] = {name: [] for name in GRADIENTS}
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = task.model()
        model, optimizer = amp.initialize(model, task.optimizer(model), opt_level="O0", verbosity=0)
        short_training.train(task, model, [optimizer], steps, torch.Generator().manual_seed(seed))
        exact = gradients(task, model, batches)
        amp.restore()
        for name, (level, options) in GRADIENTS.items():
            copied = copy.deepcopy(model)
            copied, _ = amp.initialize(copied, task.optimizer(copied), opt_level=level, verbosity=0, **options)
            found = gradients(task, copied, batches)
            amp.restore()
            apart = [((g - g32).norm() / g32.norm()).item() for g, g32 in zip(found, exact, strict=True)]
            errors[name].append(statistics.mean(apart))
    return errors


def gradients(task: Any, model: nn.Module, batches: int) -> list[torch.Tensor]:
    """Return for each batch the gradients of all parameters, concatenated into one FP32 vector."""
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(batches):
        inputs, targets = task.batch(generator)
        loss = task.loss(model(inputs), targets)
        of_each = torch.autograd.grad(loss, list(model.parameters()))
        found.append(torch.cat([grad.float().flatten() for grad in of_each]))
    return found


def of_gradients(errors: dict[str, list[float]]) -> list[str]:
    rows = [["format", "error of a step's gradient", "of the seeds"], ["---", "---:", "---:"]]
    for name, each in errors.items():
        rows.append([name, f"{100 * statistics.mean(each):.1f} %", f"{100 * min(each):.1f} to {100 * max(each):.1f} %"])
    return [
        "## What they do to a gradient",
        "An order that depends less on chance: the GPT after "
        f"{AFTER} steps in FP32, and the distance of a step's gradient from FP32's at the same weights, "
        "|g - g32| / |g32|, with nothing kept in BF16 (`keep_high=()`) unless the row says so. The mean of 16 batches, "
        f"{len(next(iter(errors.values())))} seeds.",
        "\n".join(f"| {' | '.join(row)} |" for row in rows),
        "The losses are in another order, for [these reasons](low-bit.md#what-the-losses-do-not-show).",
    ]


def page(comparisons: dict[str, Comparison], errors: dict[str, list[float]]) -> str:
    first = next(iter(comparisons.values()))
    steps = listed([f"{comparison.steps} steps for {FAMILIES[f][1]}" for f, comparison in comparisons.items()])
    parts = [
        "# What would FP8 and FP4 do to a loss?",
        "<!-- Written by `make accuracy` (benchmarks/accuracy_formats.py): edit that. -->",
        "Three very small models, trained at O6 in each [format of its products](low-bit.md), and at O0 "
        "and O4 from the same weights and on the same batches. **The claims are of the order of the formats, and of "
        "the gap at this size and after so few steps.** A large model has other outliers, and more steps in which "
        "they add up. For your own script: `python -m amp_patch compare --levels O6+fp8,O6+mxfp8,O6+nvfp4 "
        "train.py`.",
        f"Each model was trained from {seeds(first)} seeds: {steps}. In the first tenth of the steps the learning rate "
        "rises, and then it falls to 0. The loss is the mean cross entropy on held-out data, in nats. The *gap* is the "
        f"gap to O0 with the same seeds, in nats, and in per cent with its interval. {JUDGED} Everything is "
        "emulated: there are no times. On average, one of twenty intervals does not contain the true gap.",
    ]
    for family, comparison in comparisons.items():
        title, _, what = FAMILIES[family]
        parts += [f"## {title}", f"{what} {ROUNDED[family]}", table(comparison, costs=False)]
    parts += of_gradients(errors)
    machine = ", ".join(f"{name} {value}" for name, value in first.machine.items())
    parts += ["## Again", "    make accuracy", f"rewrites this page too. These figures are of: {machine}."]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())

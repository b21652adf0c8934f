"""Survey healthy public models: does a level get a line that it does not deserve?

    python benchmarks/healthy.py                 # 20 models in three states, at O1, O2, O4 and O5
    python benchmarks/healthy.py --only GPT2,ViT # those with such a word in their names
    python benchmarks/healthy.py --part 1/2      # every second model, from the second on

A model is tiny and has random weights (model_cases.py). Its states: at initialization with batches of 2 and of 16
samples, and after 200 steps of AdamW with batches of 4. A line is printed for each state: levels with an error that is
told, levels that the rules have a line for, and the ratio of the gradients' error to the deserved one at each level.
The last lines have the totals of both halves of the models: a threshold is to be chosen on the first half alone. The
exit status is 1 if an error is told.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import model_cases
import torch

from amp_patch import amp

HALVES = (
    (
        *("GPT2LMHeadModel", "BertForMaskedLM", "BartForConditionalGeneration", "ViTForImageClassification"),
        *("MixtralForCausalLM", "VisionTransformer", "ShuffleNetV2", "DenseNet", "test_efficientnet", "test_vit"),
    ),
    (
        *("LlamaForCausalLM", "RobertaForMaskedLM", "MarianMTModel", "ConvNextForImageClassification"),
        *("Qwen2ForCausalLM", "SwinTransformer", "MobileNetV2", "ConvNeXt", "test_resnet", "test_maxvit"),
    ),
)
STATES = (("batch of 2", 2, 0), ("batch of 16", 16, 0), ("after 200 steps", 4, 200))
RATE = 1e-3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="words, with commas between them, one of which is in a model's name")
    parser.add_argument("--part", default="0/1", help="1/2: only every second model, from the second on")
    args = parser.parse_args()
    first, step = map(int, args.part.split("/"))
    known = {case.label: case for case in model_cases.cases()}
    totals = [Total(), Total()]
    for half, labels in enumerate(HALVES):
        chosen = [label for label in labels if any(word in label for word in args.only.split(","))]
        for label in chosen[first::step]:
            for state in STATES:
                look(known[label], state, totals[half])
    for name, total in zip(("first half", "second half"), totals, strict=True):
        print(f"{name}: {total}")
    return int(any(total.told for total in totals))


class Total:
    """What was measured of one half."""

    def __init__(self) -> None:
        self.measured = self.told = self.failed = self.by_rules = 0
        self.ratios: list[float] = []

    def __str__(self) -> str:
        ratios = sorted(self.ratios)
        spread = (
            f"ratio {statistics.median(ratios):.2g}, 95 % below {ratios[int(0.95 * len(ratios))]:.2g}; "
            if ratios
            else ""
        )
        return (
            f"{self.measured} measurements; {self.told} told; {spread}"
            f"{self.failed} not measured; {self.by_rules} with a line by rules"
        )


def look(case: model_cases.Case, state: tuple[str, int, int], total: Total) -> None:
    """Survey a model in one state, print a line, and add to the total."""
    name, size, steps = state
    torch.manual_seed(0)
    model_cases.SIZE = size
    made, begun = case.make(), time.monotonic()
    trained(made, steps)
    batch = made.batches[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = amp.survey(made.model, lambda output: made.loss(output, batch), inputs(batch))
    measured = [found for found in report.measured if not found.failed]
    ruled = [line for line in report.lines if line.breaks and line.op != "measured"]
    told = [found for found in measured if found.told or found.raised]
    ratios = [found.errors.gradient / max(found.deserved.gradient, 1e-6) for found in measured]
    total.measured += len(measured)
    total.failed += len(report.measured) - len(measured)
    total.told += len(told)
    total.by_rules += len({level for line in ruled for level in line.levels} & {each.level for each in report.measured})
    total.ratios += ratios
    print(f"{case.label}, {name}: told {[found.level for found in told]}, ", end="")
    print(f"by rules {sorted({level for line in ruled for level in line.levels})}, ", end="")
    print(f"ratios {[f'{ratio:.2g}' for ratio in ratios]}, {time.monotonic() - begun:.0f} s", flush=True)
    for found in told:
        print(f"    {found} {found.cause or ''}", flush=True)


def inputs(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in batch.items() if key != "targets"}


def trained(made: model_cases.Made, steps: int) -> None:
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=RATE)
    made.model.train()
    for step in range(steps):
        batch = made.batches[step % len(made.batches)]
        optimizer.zero_grad()
        made.loss(made.model(**inputs(batch)), batch).backward()
        optimizer.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main())

"""Survey healthy public models: does a level get a line that it does not deserve?

    python benchmarks/healthy.py                 # 38 models in three states, at O1, O2, O4 and O5
    python benchmarks/healthy.py --only GPT2,ViT # those with such a word in their names
    python benchmarks/healthy.py --part 1/2      # every second model, from the second on

A model is tiny and has random weights: 20 are of transformers, torchvision and timm (model_cases.py), 18 of plain torch
(plain_cases.py, which need no package). Its states: at initialization with batches of 2 and of 16
samples, and after 200 steps of AdamW with batches of 4. A line is printed for each state: levels with an error that is
told, levels that the rules have a line for, and the ratio of the gradients' error to the deserved one at each level.
The last lines have the totals of both halves of the models: a threshold is to be chosen on the first half alone. They
also count what other thresholds than the package's would suspect, before the confirmation. The exit status is 1 if an
error is told.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import time
import warnings
from typing import Any

import model_cases
import plain_cases
import torch

from amp_patch import amp

PLAIN = [*plain_cases.PLAIN]

HALVES = (
    (
        *("GPT2LMHeadModel", "BertForMaskedLM", "BartForConditionalGeneration", "ViTForImageClassification"),
        *("MixtralForCausalLM", "VisionTransformer", "ShuffleNetV2", "DenseNet", "test_efficientnet", "test_vit"),
        *PLAIN[::2],
    ),
    (
        *("LlamaForCausalLM", "RobertaForMaskedLM", "MarianMTModel", "ConvNextForImageClassification"),
        *("Qwen2ForCausalLM", "SwinTransformer", "MobileNetV2", "ConvNeXt", "test_resnet", "test_maxvit"),
        *PLAIN[1::2],
    ),
)
STATES = (("batch of 2", 2, 0), ("batch of 16", 16, 0), ("after 200 steps", 4, 200))
RATE = 1e-3
THRESHOLDS = [(large, times) for large in (0.02, 0.05, 0.1) for times in (2.0, 3.0, 5.0, 8.0)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="words, with commas between them, one of which is in a model's name")
    parser.add_argument("--part", default="0/1", help="1/2: only every second model, from the second on")
    args = parser.parse_args()
    first, step = map(int, args.part.split("/"))
    halves = [[name for name in half if any(word in name for word in args.only.split(","))] for half in HALVES]
    known = {case.label: case for case in plain_cases.cases()}
    if not {*halves[0], *halves[1]} <= {*known}:
        known |= {case.label: case for case in model_cases.cases()}
    totals = [Total(), Total()]
    for half, labels in enumerate(halves):
        for label in labels[first::step]:
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
        self.suspects = dict.fromkeys(THRESHOLDS, 0)

    def __str__(self) -> str:
        ratios = sorted(self.ratios)
        spread = (
            f"ratio {statistics.median(ratios):.2g}, 95 % below {ratios[int(0.95 * len(ratios))]:.2g}; "
            if ratios
            else ""
        )
        grid = ", ".join(f"{large:.0%} and {times:g}x: {n}" for (large, times), n in self.suspects.items())
        return (
            f"{self.measured} measurements; {self.told} told; {spread}"
            f"{self.failed} not measured; {self.by_rules} with a line by rules\n    suspected above {grid}"
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
        report = amp.survey(made.model, lambda output: made.loss(output, batch), inputs(made.model, batch))
    measured = [found for found in report.measured if not found.failed]
    ruled = [line for line in report.lines if line.breaks and line.op != "measured"]
    told = [found for found in measured if found.told or found.raised]
    ratios = [found.errors.gradient / max(found.deserved.gradient, 1e-6) for found in measured]
    total.measured += len(measured)
    total.failed += len(report.measured) - len(measured)
    total.told += len(told)
    total.by_rules += len({level for line in ruled for level in line.levels} & {each.level for each in report.measured})
    total.ratios += ratios
    for found in measured:
        for large, times in THRESHOLDS:
            total.suspects[large, times] += bool(suspects(found, large, times))
    print(f"{case.label}, {name}: told {[found.level for found in told]}, ", end="")
    print(f"by rules {sorted({level for line in ruled for level in line.levels})}, ", end="")
    print(f"ratios {[f'{ratio:.2g}' for ratio in ratios]}, {time.monotonic() - begun:.0f} s", flush=True)
    for found in told:
        print(f"    {found} {found.cause or ''}", flush=True)


def suspects(found: Any, large: float, times: float) -> list[str]:
    """Return the names of the errors that thresholds suspect."""
    deserved, least = found.deserved.by_name(), torch.finfo(LOW[found.level in ("O4", "O5")]).eps
    deserved["output"] = max(deserved["output"], 0.29 * least * found.offset)  # as the package does
    each = found.errors.by_name().items()
    return [name for name, error in each if error > large and error > times * max(deserved.get(name, 0.0), least)]


LOW = torch.float16, torch.bfloat16


def inputs(model: torch.nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """Return what the model's forward takes of a batch."""
    takes = inspect.signature(model.forward).parameters
    keeps = any(each.kind is each.VAR_KEYWORD for each in takes.values())
    return {key: value for key, value in batch.items() if key != "targets" and (keeps or key in takes)}


def trained(made: model_cases.Made, steps: int) -> None:
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=RATE)
    made.model.train()
    for step in range(steps):
        batch = made.batches[step % len(made.batches)]
        optimizer.zero_grad()
        made.loss(made.model(**inputs(made.model, batch)), batch).backward()
        optimizer.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(main())

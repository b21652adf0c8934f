"""The survey: what it costs beside the training step that it looks at.

    python benchmarks/survey.py [--width N] [--depth N] [--tokens N] [--threads N] [--repeats N] [--json PATH]

A GPT makes one FP32 step (zero_grad, forward, loss, backward, SGD's step) alone, and `amp.survey` makes the same step
with a survey; both in one process, in turns. `time` is the survey's over the step's, the median of the turns' ratios.
`memory` is the ratio of the most bytes that torch's allocator has given out in one of them, model and batch included;
from torch's profiler, on a CPU. GPT of 10 M parameters: the default.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timing
import torch
import torch.nn.functional as F
from torch import Tensor

from amp_patch import amp

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from tasks import GPT

VOCABULARY, BATCH = 1024, 4


def rivals(width: int, depth: int, tokens: int) -> tuple[dict[str, Callable[[], Any]], int, int]:
    """Return the step and the survey of it, the number of parameters, and the bytes of model and batch."""
    torch.manual_seed(0)
    model = GPT(VOCABULARY, tokens, width, width // 64, depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randint(VOCABULARY, (BATCH, tokens))

    def loss_fn(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def step() -> None:
        with torch.profiler.record_function("rival"):
            optimizer.zero_grad()
            loss_fn(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def survey() -> None:
        with torch.profiler.record_function("rival"):
            amp.survey(model, loss_fn, batch, measure=False)

    sizes = [p.numel() for p in model.parameters()]
    return {"step": step, "survey": survey}, sum(sizes), 4 * sum(sizes) + 8 * batch.numel()


def main() -> None:
    parser = timing.parser(__doc__, repeats=7)
    for name, default in (("width", 384), ("depth", 5), ("tokens", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    calls, parameters, held = rivals(options.width, options.depth, options.tokens)
    times = timing.in_turns({name: timing.timer(call, "cpu") for name, call in calls.items()}, options.repeats, 1)
    most = {name: held + timing.most_bytes(call, "rival") for name, call in calls.items()}
    row: dict[str, Any] = {
        "parameters": parameters,
        "time": timing.ratio(times["survey"], times["step"]),
        "memory": most["survey"] / most["step"],
    }
    print(", ".join(f"{name} {value:.4g}" for name, value in row.items()))
    timing.write_json(options, [row])


if __name__ == "__main__":
    main()

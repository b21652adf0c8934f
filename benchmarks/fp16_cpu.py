"""FP16 training steps on a CPU beside the same step in FP32: the levels O1, O2 and O3, and torch's own `.half()`.

Every way takes a step in turn and its time is divided by that of the FP32 step of the same turn; the table shows
medians of these ratios, so that a busy machine slows all. Where the processor has no FP16 arithmetic, native steps are
ten to twenty times slower: `--no-native` leaves them out.

    python benchmarks/fp16_cpu.py [--threads N] [--repeats N] [--no-native] [--json PATH]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import timing
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amp_patch import amp
from amp_patch.casts.cpu_fp16 import has_fp16_arithmetic


class Transformer(nn.Module):
    """Two encoder layers of width 128 over a vocabulary of 256; predicts the next token of 8 sequences of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, activation="gelu", batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(128, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=self.head.weight.dtype)
        return self.head(self.body(self.embedding(tokens), mask=mask, is_causal=True)).flatten(0, 1)

    @staticmethod
    def batch() -> tuple[Tensor, Tensor]:
        tokens = torch.randint(256, (8, 65))
        return tokens[:, :-1], tokens[:, 1:].flatten()


def convnet() -> nn.Module:
    """Three convolutions with batch norms, and a linear head."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 3, 32, 32), torch.randint(10, (16,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "convnet": (convnet, images),
    "transformer": (Transformer, Transformer.batch),
}
WAYS = ("O1", "O2", "O3", ".half()")


def stepper(model: nn.Module, batch: tuple[Tensor, Tensor], way: str) -> Callable[[], None]:
    """One training step of a model of its own, as a function."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    inputs, targets = batch
    if way in ("FP32", ".half()"):
        if way == ".half()":
            model.half()
            inputs = inputs.half() if inputs.is_floating_point() else inputs

        @amp.disable_casts()  # another model's O1 is no business of this one
        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

        return step

    amp.initialize(model, optimizer, opt_level=way, loss_scale=128.0, cpu_fp16="emulate", verbosity=0)

    def scaled_step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    return scaled_step


def main() -> None:
    parser = timing.parser(__doc__, repeats=15)
    parser.add_argument("--native", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    ways = WAYS if options.native else WAYS[:-1]
    widths = {"model": -13, "FP32 ms": 9, **dict.fromkeys(ways, 9)}
    print(timing.heading(options))
    print(f"this CPU has {'' if has_fp16_arithmetic() else 'no '}FP16 arithmetic; time of a step over that of FP32")
    print(timing.line(list(widths), widths))
    rows = []
    for name, (make, batch) in MODELS.items():
        torch.manual_seed(0)
        data = batch()
        steps = {way: stepper(make(), data, way) for way in ("FP32", *ways)}
        times = timing.in_turns({way: timing.timer(step, "cpu") for way, step in steps.items()}, options.repeats)
        amp.restore()
        ratios = {way: timing.ratio(times[way], times["FP32"]) for way in ways}
        rows.append({"model": name, "FP32 ms": statistics.median(times["FP32"]) / 1e3, **ratios})
        print(timing.line([*rows[-1].values()], widths), flush=True)
    timing.write_json(options, rows)


if __name__ == "__main__":
    main()

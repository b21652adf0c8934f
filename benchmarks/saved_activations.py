"""Measure memory and time of a step whose activations are saved in eight bits, beside its level without and O0.

Each row is a model at a level. `kept` are the bytes that autograd saves in forward and loss, and `peak` is the most
that torch's allocator has given out at once in forward and backward, both relative to O0; `+act8 over level` divides
the time of a step by that of the level alone. The rivals run in turns. On a CPU that emulates the level's type, the
FP32 copies of a product's operands are in the peak: `--cpu-half native` measures without.

    python benchmarks/saved_activations.py [--models GPT ResNet ViT LSTM] [--levels O1 O2 O4 O5] [--cpu-half native]
                                            [--threads N] [--device cuda] [--repeats N] [--json PATH]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timing
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_patch import amp
from amp_patch.diagnose.recording.activations import WeighedStep

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import tasks

Model = tuple[nn.Module, Tensor, Tensor]
LEVELS = ("O1", "O2", "O4", "O5")
WIDTHS = {
    "model": -8,
    "level": -7,
    "kept over O0: level": 21,
    "its +act8": 11,
    "peak over O0: level": 21,
    "+act8": 7,
    "time: +act8 over level": 24,
}


class Block(nn.Module):
    """Two convolutions with batch norms, and the input added, as in ResNet-18."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(width, width, 3, 1, 1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.two(F.relu(self.norm1(self.one(x))))) + x)


def gpt() -> Model:
    tokens = torch.randint(128, (4, 257))
    return tasks.GPT(128, 256, width=256, heads=8, depth=4), tokens[:, :-1], tokens[:, 1:].reshape(-1)


def resnet() -> Model:
    stem = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    layers = [*stem, *(Block(32) for _ in range(4)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    return nn.Sequential(*layers), torch.randn(16, 3, 32, 32), torch.randint(10, (16,))


class ViT(nn.Module):
    """Four blocks of attention and MLP over 64 patches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches, self.position = nn.Conv2d(3, width, 4, 4), nn.Parameter(torch.zeros(64, width))
        block = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.1, F.gelu, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 4, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.blocks(x + self.position).mean(1))


def vit() -> Model:
    return ViT(256), torch.randn(16, 3, 32, 32), torch.randint(10, (16,))


def lstm() -> Model:
    tokens = torch.randint(128, (16, 65))
    return tasks.LSTM(128, width=256, hidden=256), tokens[:, :-1], tokens[:, 1:].reshape(-1)


MODELS = {"GPT": gpt, "ResNet": resnet, "ViT": vit, "LSTM": lstm}


def step_of(make: Callable[[], Model], level: str, options: argparse.Namespace) -> tuple[Callable[[], None], int]:
    """Return a function that makes forward, loss and backward at `level`, and the bytes that autograd keeps for it."""
    torch.manual_seed(0)
    module, inputs, target = make()
    inputs, target = inputs.to(options.device), target.to(options.device)
    module = module.to(options.device)
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.0)
    given = {} if options.cpu_half is None or level == "O0" else {"cpu_half": options.cpu_half}
    model, optimizer = amp.initialize(module, optimizer, opt_level=level, verbosity=0, **given)

    def step() -> None:
        logits = model(inputs)
        loss = F.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), target)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.zero_grad()

    weighed = WeighedStep([*module.parameters(), *module.buffers(), inputs, target], 0)
    step()
    kept = weighed.leave()["activations"]
    assert kept is not None
    return step, kept


def peak(step: Callable[[], None]) -> int:
    """Return the most bytes in a second step."""

    def run() -> None:
        for _ in range(2):
            with torch.profiler.record_function("step"):
                step()

    return timing.most_bytes(run, "step")


def compare(name: str, level: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return one row: a model at a level."""
    levels = ("O0", level, f"{level}+act8")
    held, kept = {}, {}
    for each in levels:
        step, kept[each] = step_of(MODELS[name], each, options)
        held[each] = peak(step)
        amp.restore()
    steps = {each: step_of(MODELS[name], each, options)[0] for each in levels[1:]}
    times = timing.in_turns({key: timing.timer(step, options.device) for key, step in steps.items()}, options.repeats)
    amp.restore()
    shares = [sizes[each] / sizes["O0"] for sizes in (kept, held) for each in levels[1:]]
    return {
        "model": name,
        "level": level,
        **dict(zip(("kept", "kept act8", "peak", "peak act8"), shares, strict=True)),
        "time": timing.ratio(times[levels[2]], times[level]),
    }


def main() -> None:
    parser = timing.parser(__doc__, repeats=7)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--cpu-half", choices=("emulate", "native"))
    options = parser.parse_args()
    rows = (compare(name, level, options) for name in options.models for level in options.levels)
    timing.measure(options, WIDTHS, rows)


if __name__ == "__main__":
    main()

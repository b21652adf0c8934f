"""What the recipes share: a small convnet, batches of digits, the command line. Nothing here is mixed precision."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1]))

from data import Split, digits


@functools.cache
def load(device: str) -> Split:
    """The digits with mean 0 and deviation 1: (images [n, 1, 8, 8] in FP32, labels [n]) for training, and held out."""
    (images, labels), (held_out, wanted) = digits(device)
    return ((images - 0.3) / 0.375, labels), ((held_out - 0.3) / 0.375, wanted)


@dataclass(frozen=True)
class Run:
    """What is chosen on the command line. `dtype=None` leaves the type to the device (native) or to the level."""

    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: torch.dtype | None = None
    seed: int = 0
    steps: int = 20

    def model(self) -> nn.Sequential:
        """The same weights in every form. [:3] makes 128 features of an image, [3:] classes of those."""
        torch.manual_seed(self.seed)
        features = (nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten())
        return nn.Sequential(*features, nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 10)).to(self.device)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(images [64, 1, 8, 8] in FP32, labels [64]), the same in every form, once for each step."""
        images, labels = load(self.device)[0]
        for step in range(self.steps):
            generator = torch.Generator().manual_seed(1000 * self.seed + step)
            batch = torch.randperm(len(images), generator=generator)[:64].to(self.device)
            yield images[batch], labels[batch]


def main(native: Callable[..., list[float]], opt_level: Callable[..., list[float]], **flags: bool) -> None:
    """Run one form of a recipe and print its losses. A keyword of the forms becomes a flag with that default."""
    parser = argparse.ArgumentParser(description=sys.modules[native.__module__].__doc__.splitlines()[0])
    forms = "native: with amp_patch's amp; torch: the same code with torch's; opt-level: amp.initialize"
    parser.add_argument("--form", choices=("native", "torch", "opt-level"), default="opt-level", help=forms)
    parser.add_argument("--opt-level", default="O1", help="O0 to O5")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"))
    parser.add_argument("--device", default=Run.device)
    parser.add_argument("--seed", type=int, default=Run.seed)
    parser.add_argument("--steps", type=int, default=Run.steps)
    for name, default in flags.items():
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=default)
    args = parser.parse_args()

    run = Run(args.device, args.dtype and getattr(torch, args.dtype), args.seed, args.steps)
    chosen = {name: getattr(args, name) for name in flags}
    if args.form == "opt-level":
        losses = opt_level(args.opt_level, run, **chosen)
    else:
        losses = native(_amp_of(args.form), run, **chosen)
    for step, loss in enumerate(losses, 1):
        print(f"step {step:3}  loss {loss:.4f}")


def _amp_of(form: str) -> Any:
    if form == "torch":
        from torch import amp
    else:
        from amp_patch import amp
    return amp

"""Measure memory, time and loss at O1 and O4 if norms return their input's type instead of FP32.

    python benchmarks/norms.py [--models gpt encoder convnext unet] [--levels O1 O4] [--seeds N] [--steps N]
                               [--threads N] [--device cuda] [--repeats N] [--json PATH]

Four models, each with norms of another kind or in another place:

    gpt       a GPT with layer norms before attention and MLP: their input is the residual sum, in FP32
    encoder   a BERT, torch.nn.TransformerEncoder with layer norms after the residual sums
    convnext  ConvNeXt blocks with layer scale: a layer norm between a convolution and a linear layer
    unet      a U-Net with residual blocks of group norm, SiLU and convolution

Each is trained at a level in three ways:

    fp32      norms give FP32, as under torch.autocast
    as input  initialize(low_precision_norms=True): the type of an FP16 or BF16 input, else FP32
    lowered   as before, and each norm's input is cast to the low-precision type first

`MB` is the memory that autograd saves for the backward of a step, and `ratio` is its ratio to fp32's. `time` is the
time of a step (zero_grad, forward, loss, backward, step) over fp32's, taken in turns. `held out` is the loss on
held-out data of a narrower model on the data of examples/, its mean over the seeds. `seeds` has the lowest and the
highest loss at O0. `to O0` and `to fp32` are mean differences of the loss, each followed by the p of the paired t-test
over the seeds. FP16 on a CPU is emulated.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import timing
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_patch import amp
from amp_patch.comparison.measures import paired_t_test

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from data import digits, topics
from tasks import GPT

RIVALS = ("fp32", "as input", "lowered")
DTYPES = {"O1": torch.float16, "O4": torch.bfloat16}
NORMS = (nn.LayerNorm, nn.GroupNorm)
COLUMNS = {"model": -10, "level": -7, "rival": -10, "MB": 9, "ratio": 8, "time": 8, "held out": 11, "seeds": 19}
COLUMNS |= {"to O0": 11, "p": 9, "to fp32": 11, " p": 9, "skipped": 9}
CONTEXT = 32
Batch = tuple[Tensor, Tensor]


class Encoder(nn.Module):
    def __init__(self, vocabulary: int, context: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.norm(self.token(characters) + self.position.weight[: characters.shape[1]])
        return self.head(self.layers(x))


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mlp(self.norm(self.mix(x).movedim(1, -1)))
        return x + (self.scale * mixed).movedim(-1, 1)


class ConvNeXt(nn.Module):
    """Two stages of two blocks, on images of any size."""

    def __init__(self, channels: int, width: int, classes: int) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(channels, width, 2, stride=2), nn.LayerNorm(width)
        self.early = nn.Sequential(*(ConvNeXtBlock(width) for _ in range(2)))
        self.norm, self.halve = nn.LayerNorm(width), nn.Conv2d(width, 2 * width, 2, stride=2)
        self.late = nn.Sequential(*(ConvNeXtBlock(2 * width) for _ in range(2)))
        self.last_norm, self.head = nn.LayerNorm(2 * width), nn.Linear(2 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.early(self.stem_norm(self.stem(images).movedim(1, -1)).movedim(-1, 1))
        x = self.late(self.halve(self.norm(x.movedim(1, -1)).movedim(-1, 1)))
        return self.head(self.last_norm(x.mean((-2, -1))))


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.GroupNorm(8, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1)),
            *(nn.GroupNorm(8, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1)),
        )
        self.past = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.past(x) + self.body(x)


class UNet(nn.Module):
    """A U-Net of three resolutions, as in a diffusion model: it predicts the noise in an image."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.ModuleList([Residual(width, width), Residual(2 * width, 2 * width)])
        self.halve = nn.ModuleList([nn.Conv2d(width * k, 2 * width, 3, stride=2, padding=1) for k in (1, 2)])
        self.middle = Residual(2 * width, 2 * width)
        self.widen = nn.ModuleList([nn.Conv2d(2 * width, 2 * width, 3, padding=1) for _ in range(2)])
        self.up = nn.ModuleList([Residual(4 * width, 2 * width), Residual(3 * width, width)])
        self.last = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, channels, 3, padding=1))

    def forward(self, images: Tensor) -> Tensor:
        x, kept = self.stem(images), []
        for block, halve in zip(self.down, self.halve, strict=True):
            kept.append(block(x))
            x = halve(kept[-1])
        x = self.middle(x)
        for block, widen in zip(self.up, self.widen, strict=True):
            x = block(torch.cat([widen(F.interpolate(x, scale_factor=2.0)), kept.pop()], 1))
        return self.last(x)


def entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy. A target of -1 is ignored."""
    return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), targets.flatten(), ignore_index=-1)


# ---------------------------------------------------------------------------------------------------------------------
# Data: batches to train on, and one that is held out


class Data(NamedTuple):
    batch: Callable[[torch.Generator], Batch]
    held_out: Batch


@cache
def text() -> Data:
    train, held_out, _ = topics()

    def windows(codes: Tensor, starts: Tensor) -> Batch:
        window = starts[:, None] + torch.arange(CONTEXT)
        return codes[window], codes[window + 1]

    return Data(
        lambda generator: windows(train, torch.randint(len(train) - CONTEXT, (16,), generator=generator)),
        windows(held_out, torch.arange(0, len(held_out) - CONTEXT - 1, 3 * CONTEXT)),
    )


@cache
def masked_text() -> Data:
    """Return the text with 15 % of the characters masked, which are the targets."""
    plain, hole = text(), topics()[2]

    def masked(codes: Tensor, generator: torch.Generator) -> Batch:
        hidden = torch.rand(codes.shape, generator=generator) < 0.15
        return codes.masked_fill(hidden, hole), codes.masked_fill(~hidden, -1)

    def batch(generator: torch.Generator) -> Batch:
        return masked(plain.batch(generator)[0], generator)

    return Data(batch, masked(plain.held_out[0], torch.Generator().manual_seed(0)))


@cache
def images() -> Data:
    (train, labels), held_out = digits()

    def batch(generator: torch.Generator) -> Batch:
        drawn = torch.randint(len(train), (64,), generator=generator)
        return train[drawn], labels[drawn]

    return Data(batch, held_out)


@cache
def noisy_images() -> Data:
    def noisy(clean: Tensor, generator: torch.Generator) -> Batch:
        noise = torch.randn(clean.shape, generator=generator)
        share = torch.rand(len(clean), 1, 1, 1, generator=generator)
        return (1 - share).sqrt() * clean + share.sqrt() * noise, noise

    plain = images()
    return Data(
        lambda generator: noisy(plain.batch(generator)[0], generator),
        noisy(plain.held_out[0], torch.Generator().manual_seed(0)),
    )


# ---------------------------------------------------------------------------------------------------------------------
# The models


class Family(NamedTuple):
    small: Callable[[], nn.Module]  # trained on `data`
    data: Callable[[], Data]
    large: Callable[[], nn.Module]  # memory and time are measured with it, on `sample`
    sample: Callable[[], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    rate: float


def sample_text(mask: bool) -> Batch:
    codes = torch.randint(96, (4, 129))
    return codes[:, :-1], codes[:, 1:].masked_fill(torch.rand(4, 128) < 0.85, -1) if mask else codes[:, 1:]


FAMILIES = {
    "gpt": Family(
        small=lambda: GPT(topics()[2], CONTEXT, width=64, heads=4, depth=2),
        data=text,
        large=lambda: GPT(96, 128, width=256, heads=8, depth=2),
        sample=lambda: sample_text(mask=False),
        loss=entropy,
        rate=4e-3,
    ),
    "encoder": Family(
        small=lambda: Encoder(topics()[2] + 1, CONTEXT, width=64, heads=4, depth=2),
        data=masked_text,
        large=lambda: Encoder(96, 128, width=256, heads=8, depth=2),
        sample=lambda: sample_text(mask=True),
        loss=entropy,
        rate=2e-3,
    ),
    "convnext": Family(
        small=lambda: ConvNeXt(1, 16, 10),
        data=images,
        large=lambda: ConvNeXt(3, 64, 10),
        sample=lambda: (torch.randn(8, 3, 32, 32), torch.randint(10, (8,))),
        loss=entropy,
        rate=4e-3,
    ),
    "unet": Family(
        small=lambda: UNet(1, 16),
        data=noisy_images,
        large=lambda: UNet(3, 32),
        sample=lambda: (torch.randn(2, 3, 32, 32), torch.randn(2, 3, 32, 32)),
        loss=F.mse_loss,
        rate=2e-3,
    ),
}


class Training:
    """A model at a level, trained as one of the rivals. If the rival is None, it is trained at O0."""

    def __init__(self, model: nn.Module, rate: float, loss: Any, level: str, rival: str | None) -> None:
        if rival == "lowered":
            for norm in model.modules():
                if isinstance(norm, NORMS):
                    norm.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(DTYPES[level]),))
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), eps=1e-6)
        options: dict[str, Any] = {} if rival in (None, "fp32") else {"low_precision_norms": True}
        if rival is not None:
            options |= {"opt_level": level, "cpu_half": "emulate"}
        self.model, self.optimizer = amp.initialize(model, optimizer, **{"opt_level": "O0", "verbosity": 0} | options)
        self.loss = loss

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(self.model(inputs), targets)
        with amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        self.optimizer.step()

    def skips(self) -> int:
        self.optimizer._amp_stash.collect_device_skips(wait=True)
        return sum(scaler.skips for scaler in self.optimizer._amp_stash.scalers)


def to(device: str, batch: Batch) -> Batch:
    return batch[0].to(device), batch[1].to(device)


def sizes_and_times(options: argparse.Namespace, family: Family, level: str) -> dict[str, dict[str, float]]:
    """Return rival -> its "bytes", "ratio" and "time", measured with the large model."""
    torch.manual_seed(0)
    batch = to(options.device, family.sample())
    steps, saved = {}, {}
    for rival in (*RIVALS, None):
        torch.manual_seed(0)
        with amp.record(activations=True) as run:
            training = Training(family.large().to(options.device), family.rate, family.loss, level, rival)
            for _ in range(3):
                training.step(*batch)
        saved[rival] = run.activations
        steps[str(rival)] = timing.timer(lambda training=training: training.step(*batch), options.device)
    times = timing.in_turns(steps, options.repeats)
    amp.restore()
    return {
        str(rival): {
            "bytes": saved[rival],
            "ratio": saved[rival] / saved["fp32"],
            "time": timing.ratio(times[str(rival)], times["fp32"]),
        }
        for rival in (*RIVALS, None)
    }


def trained(options: argparse.Namespace, family: Family, level: str, rival: str | None) -> tuple[list[float], int]:
    """Train the small model from each seed. Return the held-out losses, and the number of skipped steps."""
    data, losses, skipped = family.data(), [], 0
    held_out = to(options.device, data.held_out)
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        training = Training(family.small().to(options.device), family.rate, family.loss, level, rival)
        # The learning rate rises, and then falls to 0, so that the evaluated weights no longer move.
        warm = max(1, options.steps // 10)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            training.optimizer, lambda step, warm=warm: min((step + 1) / warm, 1 - step / options.steps)
        )
        for _ in range(options.steps):
            training.step(*to(options.device, data.batch(generator)))
            schedule.step()
        skipped += training.skips()
        training.model.eval()
        with torch.no_grad():
            losses.append(family.loss(training.model(held_out[0]).float(), held_out[1]).item())
        amp.restore()
    return losses, skipped


def difference(losses: Sequence[float], others: Sequence[float]) -> tuple[float, float | None]:
    """Return the difference of the means, and the p of the paired t-test; None for one pair."""
    p = paired_t_test(losses, others) if len(losses) > 1 else None
    return statistics.mean(losses) - statistics.mean(others), p


def compare(options: argparse.Namespace, name: str, level: str, base: list[float]) -> list[dict[str, Any]]:
    family, rows = FAMILIES[name], []
    measured = sizes_and_times(options, family, level)
    for rival in RIVALS:
        losses, skipped = trained(options, family, level, rival) if options.seeds else ([], 0)
        row: dict[str, Any] = {"model": name, "level": level, "rival": rival, **measured[rival], "losses": losses}
        row |= {"O0 ratio": measured["None"]["ratio"], "O0 time": measured["None"]["time"], "skipped": skipped}
        if losses:
            row |= {"held_out": statistics.mean(losses), "O0 losses": base, "to O0": difference(losses, base)}
            row["to fp32"] = difference(losses, rows[0]["losses"]) if rows else (None, None)
        rows.append(row)
    return rows


def cells(row: dict[str, Any]) -> list[Any]:
    found = [row["model"], row["level"], row["rival"], row["bytes"] / 1e6, row["ratio"], row["time"]]
    if row["losses"]:
        low, high = min(row["O0 losses"]), max(row["O0 losses"])
        found += [f"{row['held_out']:.5f}", f"{low:.5f}-{high:.5f}"]
        for mean, p in (row["to O0"], row["to fp32"]):
            found += [None if mean is None else f"{mean:+.5f}", None if p is None else f"{p:.3f}"]
        found.append(row["skipped"])
    return found + [None] * (len(COLUMNS) - len(found))


def main() -> None:
    parser = timing.parser(__doc__, repeats=15)
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--levels", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each; 0: none, only bytes and times")
    parser.add_argument("--steps", type=int, default=200, help="of each training")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    print(f"{timing.heading(options)}; {options.seeds} seeds of {options.steps} steps")
    print(timing.line(list(COLUMNS), COLUMNS))
    rows = []
    for name in options.models:
        base, _ = trained(options, FAMILIES[name], "O0", None) if options.seeds else ([], 0)
        for level in options.levels:
            for row in compare(options, name, level, base):
                rows.append(row)
                print(timing.line(cells(row), COLUMNS), flush=True)
            timing.write_json(options, rows)


if __name__ == "__main__":
    main()

"""Time a whole training step (zero_grad, forward, loss, backward, step) at our levels, in FP32 and with torch.autocast.

    python benchmarks/step.py [--dtype bf16|fp16] [--size 12m|100m] [--models gpt convnet] [--batches 1 8]
                              [--threads N] [--device cuda] [--repeats N] [--json PATH]

All rivals train the same model on the same batch with torch.optim.AdamW(fused=True):

    fp32              the plain script
    autocast          torch.autocast
    autocast+scaler   torch.autocast and torch.amp.GradScaler; the ratios are relative to it
    O1, O2            amp_patch, at its defaults for the dtype
    O2 foreach        O2 with torch.optim.AdamW(foreach=True), which cannot skip a step on the device; only on request

Each rival has its own process, since O1 patches torch's functions for a whole process. The rivals run in turns, one at
a time. `host ms` is the time until a step returns, with the device idle before. `skipped` is the number of steps that
overflowed, and `syncs` how often one step waits for the GPU. `GB at start` and `in a step` are the peaks of the GPU
memory that torch has allocated, until the model is ready and in a step.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from multiprocessing import get_context
from typing import Any, NamedTuple

import timing
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_patch import amp

RIVALS = ("fp32", "autocast", "autocast+scaler", "O1", "O2")
FOREACH = "O2 foreach"
BASELINE = "autocast+scaler"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FIGURES = ("host_milliseconds", "skipped", "syncs", "gb_at_start", "gb_in_a_step")
HOST_STEPS = 5
INITIAL_SCALE = 2.0**16  # the initial scale of torch's GradScaler
STEPS = 3  # in a turn: more than one, because in the first the caches have the data of another rival
COLUMNS = {"model": -9, "batch": 5, "": 2, "rival": -17, "ms a step": 10, "ratio": 8, "first loss": 12, "host ms": 10}
COLUMNS |= {"skipped": 9, "syncs": 7, "GB at start": 13, "in a step": 11}


class Sizes(NamedTuple):
    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int
    channels: int  # of the convnet's first stage


SIZES = {"12m": Sizes(6, 384, 6, 1024, 128, 32), "100m": Sizes(12, 768, 12, 32768, 512, 128)}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Parameter(torch.randn(sizes.sequence, sizes.width) * 0.02)
        self.blocks = nn.Sequential(*(Block(sizes.width, sizes.heads) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions[: tokens.shape[1]]))).flatten(0, 1)


def convnet(channels: int) -> nn.Module:
    """Return a VGG of three stages for 32x32 images."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in (channels, 2 * channels, 4 * channels):
        for channel in (inputs, outputs):
            layers += [nn.Conv2d(channel, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        inputs = outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * inputs, 10))


def subject(kind: str, sizes: Sizes, batch: int, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return (model, inputs, targets), which are the same for every rival."""
    torch.manual_seed(0)
    if kind == "gpt":
        model: nn.Module = GPT(sizes)
        tokens = torch.randint(sizes.vocabulary, (batch, sizes.sequence + 1))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()
    else:
        model = convnet(sizes.channels)
        inputs, targets = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    return model.to(device), inputs.to(device), targets.to(device)


class Task(NamedTuple):
    rival: str
    dtype: torch.dtype
    kind: str
    sizes: Sizes
    batch: int
    device: str
    threads: int
    compiled: bool = False  # torch.compile(model)


class Training(NamedTuple):
    step: Callable[[], Tensor]  # as a user would write it; returns the loss
    skips: Callable[[], int | None]  # returns the number of skipped steps so far; None if the loss is not scaled


def training_of(task: Task) -> Training:
    """Return the training of a rival, before its first step."""
    rival, dtype = task.rival, task.dtype
    model, inputs, targets = subject(task.kind, task.sizes, task.batch, task.device)
    kernels = {"foreach" if rival == FOREACH else "fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **kernels)
    if task.compiled:
        model.compile()
    device_type = torch.device(task.device).type

    def fp32() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    def autocast() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype):
            loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    scaler = torch.amp.GradScaler(device_type, INITIAL_SCALE, enabled=rival == BASELINE)

    def autocast_and_scaler() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device_type, dtype):
            loss = F.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    def level() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        return loss

    steps = {"fp32": fp32, "autocast": autocast, BASELINE: autocast_and_scaler}
    if rival == BASELINE:  # the training is too short for the scale to grow: it only halves, at each skip
        return Training(steps[rival], lambda: round(math.log2(INITIAL_SCALE / scaler.get_scale())))
    if rival in steps:
        return Training(steps[rival], lambda: None)
    model, optimizer = amp.initialize(model, optimizer, opt_level=rival.split()[0], dtype=dtype)

    def skips() -> int:
        optimizer._amp_stash.collect_device_skips(wait=True)
        return sum(scaler.skips for scaler in optimizer._amp_stash.scalers)

    return Training(level, skips)


def work(task: Task, pipe: Any) -> None:
    """Run in the process of a rival: send the first loss, then the time of a turn for each message.

    The message None ends the process, which then sends its other figures.
    """
    torch.set_num_threads(task.threads)
    step, skips = training_of(task)
    figures: dict[str, Any] = {"gb_at_start": timing.memory_gb(task.device)}
    run = timing.timer(step, task.device, STEPS)
    pipe.send(step().item())
    while pipe.recv() is not None:
        pipe.send(run())
    timing.memory_gb(task.device)  # begins a new peak
    host = [timing.until_return(step, task.device) / 1e3 for _ in range(HOST_STEPS)]
    figures |= {"gb_in_a_step": timing.memory_gb(task.device), "host_milliseconds": statistics.median(host)}
    pipe.send(figures | {"syncs": timing.syncs(step, task.device), "skipped": skips()})


class Process:
    """The process of a rival, which waits between its turns. Call `first_loss` first, and `figures` last."""

    def __init__(self, task: Task) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._worker = context.Process(target=work, args=(task, theirs))
        self._worker.start()
        theirs.close()

    def first_loss(self) -> float:
        return self._pipe.recv()

    def turn(self) -> float:
        self._pipe.send(True)
        return self._pipe.recv()

    def figures(self) -> dict[str, Any]:
        self._pipe.send(None)
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        self._worker.join()


def compare(options: argparse.Namespace, kind: str, batch: int, compiled: bool = False) -> list[dict[str, Any]]:
    """Return a row for each rival, for one model and batch size: its median time, and its ratio to the baseline's."""
    about = (DTYPES[options.dtype], kind, SIZES[options.size], batch, options.device, options.threads, compiled)
    with ExitStack() as stack:
        rivals = {rival: stack.enter_context(closing(Process(Task(rival, *about)))) for rival in options.rivals}
        losses = {name: rival.first_loss() for name, rival in rivals.items()}
        times = timing.in_turns({name: rival.turn for name, rival in rivals.items()}, options.repeats)
        figures = {name: rival.figures() for name, rival in rivals.items()}
    return [
        {
            "model": kind,
            "batch": batch,
            "rival": rival,
            "milliseconds": statistics.median(times[rival]) / 1e3,
            "ratio": timing.ratio(times[rival], times[BASELINE]),
            "first_loss": losses[rival],
            **{name: figures[rival][name] for name in FIGURES},
        }
        for rival in options.rivals
    ]


def main(
    description: str | None = __doc__,
    models: Sequence[str] = ("gpt", "convnet"),
    batches: Sequence[int] = (1, 8),
    compiled: bool = False,
) -> None:
    """Print the table of these models and batch sizes, unless the command line asks for others."""
    parser = timing.parser(description, repeats=21)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--size", choices=SIZES, default="12m", help="parameters of the GPT")
    parser.add_argument("--models", nargs="+", choices=("gpt", "convnet"), default=models)
    parser.add_argument("--batches", nargs="+", type=int, default=batches)
    parser.add_argument("--rivals", nargs="+", choices=(*RIVALS, FOREACH), default=RIVALS)
    options = parser.parse_args()
    if BASELINE not in options.rivals:
        parser.error(f"--rivals must name {BASELINE}: every ratio is over it")

    print(f"{timing.heading(options)}; ratios over {BASELINE}, {options.dtype}{', all compiled' if compiled else ''}")
    print(timing.line(list(COLUMNS), COLUMNS))
    rows = []
    for kind in options.models:
        for batch in options.batches:
            for row in compare(options, kind, batch, compiled):
                rows.append(row)
                cells = (row[name] for name in ("rival", "milliseconds", "ratio", "first_loss", *FIGURES))
                print(timing.line((kind, batch, "", *cells), COLUMNS), flush=True)
            timing.write_json(options, rows)


if __name__ == "__main__":
    main()

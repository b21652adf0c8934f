"""A whole training step (zero_grad, forward, loss, backward, step): our levels beside FP32 and torch's own autocast.

    python benchmarks/step.py [--dtype bf16|fp16] [--size 12m|100m] [--models gpt convnet] [--batches 1 8]
                              [--threads N] [--device cuda] [--repeats N] [--json PATH]

Everyone trains the same model on the same batch with torch.optim.AdamW(fused=True):

    fp32              the plain script
    autocast          torch.autocast
    autocast+scaler   torch.autocast and torch.amp.GradScaler: what the ratios are over
    O1, O2            amp_patch, at its defaults for the dtype

Each has a process of its own, since O1 patches torch's functions for a whole process, and one runs at a time, in turns.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from typing import Any, NamedTuple

import timing
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_patch import amp

RIVALS = ("fp32", "autocast", "autocast+scaler", "O1", "O2")
BASELINE = "autocast+scaler"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 3  # in a turn: the first of them finds the caches as another rival left them
COLUMNS = {"model": -9, "batch": 5, "": 2, "rival": -17, "ms a step": 10, "ratio": 8, "first loss": 12}


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
    """A VGG of three stages for 32x32 images."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in (channels, 2 * channels, 4 * channels):
        for channel in (inputs, outputs):
            layers += [nn.Conv2d(channel, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
        inputs = outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * inputs, 10))


def subject(kind: str, sizes: Sizes, batch: int, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """(model, inputs, targets), the same for every rival."""
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


def step_of(task: Task) -> Callable[[], Tensor]:
    """One training step of a rival, as a user would write it; returns the loss."""
    rival, dtype = task.rival, task.dtype
    model, inputs, targets = subject(task.kind, task.sizes, task.batch, task.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
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

    scaler = torch.amp.GradScaler(device_type, enabled=rival == BASELINE)

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
    if rival in steps:
        return steps[rival]
    model, optimizer = amp.initialize(model, optimizer, opt_level=rival, dtype=dtype)
    return level


def work(task: Task, pipe: Any) -> None:
    """A rival's process: times a turn whenever asked; None ends it."""
    torch.set_num_threads(task.threads)
    step = step_of(task)
    run = timing.timer(step, task.device, STEPS)
    pipe.send(step().item())
    while pipe.recv() is not None:
        pipe.send(run())


@contextmanager
def process(task: Task) -> Any:
    """(timer, loss of the first step) of a rival that waits in its own process."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    worker = context.Process(target=work, args=(task, theirs))
    worker.start()
    theirs.close()

    def turn() -> float:
        ours.send(True)
        return ours.recv()

    try:
        yield turn, ours.recv()
        ours.send(None)
    finally:
        ours.close()
        worker.join()


def compare(options: argparse.Namespace, kind: str, batch: int, compiled: bool = False) -> list[dict[str, Any]]:
    """Every rival's median, and its ratio over the baseline's, for one model and batch size."""
    with ExitStack() as stack:
        timers, losses = {}, {}
        for rival in options.rivals:
            about = (DTYPES[options.dtype], kind, SIZES[options.size], batch, options.device, options.threads, compiled)
            timers[rival], losses[rival] = stack.enter_context(process(Task(rival, *about)))
        times = timing.in_turns(timers, options.repeats)
    return [
        {
            "model": kind,
            "batch": batch,
            "rival": rival,
            "milliseconds": statistics.median(times[rival]) / 1e3,
            "ratio": timing.ratio(times[rival], times[BASELINE]),
            "first_loss": losses[rival],
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
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=RIVALS)
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
                cells = (kind, batch, "", row["rival"], row["milliseconds"], row["ratio"], row["first_loss"])
                print(timing.line(cells, COLUMNS), flush=True)
    timing.write_json(options, rows)


if __name__ == "__main__":
    main()

"""Time training steps in FP16 and BF16 on a CPU, relative to FP32: amp_patch's levels, and torch.autocast.

`emulate` is `cpu_half="emulate"`: products are computed in FP32, and rounded once. `native` uses torch's own kernels,
as torch.autocast does. Each way has its own process, and the processes take steps in turns. A time is divided by the
FP32 step's time of the same turn; the table has medians of these ratios, so that other work on the machine affects all
ways alike. `saved` has the bytes that autograd saves in a forward, relative to FP32. `--dtype fp8 fp4` measures O6 and
O7 in the formats of their products.

    python benchmarks/cpu_half.py [--dtype bf16|fp16|fp8|fp4 ...] [--models NAME ...] [--no-native] [--threads N]
                                  [--repeats N] [--json PATH]

To make a CPU with BF16 arithmetic behave as one without, set ONEDNN_MAX_CPU_ISA=AVX512_CORE_VNNI; as one with AVX2
alone, ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from contextlib import ExitStack, closing
from multiprocessing import get_context
from typing import Any, NamedTuple

import timing
import torch
from step import GPT, Sizes
from torch import Tensor, nn
from torch.nn import functional as F

from amp_patch import amp
from amp_patch.casts.cpu_half import has_arithmetic


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


def gpt(size: Sizes, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    tokens = torch.randint(size.vocabulary, (batch, size.sequence + 1))
    return GPT(size), tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()


SMALL = Sizes(4, 256, 8, 512, 128, 0)  # 3.5 M parameters
DEMO = Sizes(2, 256, 8, 96, 64, 0)  # of `make demo`: 1.6 M parameters
MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {
    "convnet": lambda: (convnet(), *images()),
    "transformer": lambda: (Transformer(), *Transformer.batch()),
    "demo's GPT": lambda: gpt(DEMO, 8),
    "GPT, batch 1": lambda: gpt(SMALL, 1),
    "GPT, batch 8": lambda: gpt(SMALL, 8),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LEVELS = {
    "bf16": ("O4", "O5"),
    "fp16": ("O1", "O2"),
    "fp8": ("O6+fp8", "O6+fp8_tensorwise", "O6+mxfp8", "O7+mxfp8"),
    "fp4": ("O6+nvfp4", "O7+nvfp4", "O6+nvfp4_naive"),
}


class Task(NamedTuple):
    way: str  # "fp32", "autocast", or a level and its cpu_half: "O5 emulate", "O6+mxfp8 auto"
    dtype: torch.dtype
    model: str
    threads: int


def stepper(task: Task) -> tuple[Callable[[], None], Callable[[], Tensor]]:
    """Return two functions: a training step, and the forward with the loss alone."""
    torch.manual_seed(0)
    model, inputs, targets = MODELS[task.model]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    level, _, cpu_half = task.way.partition(" ")
    if cpu_half:
        options: dict[str, Any] = {"loss_scale": 128.0, "cpu_half": cpu_half, "verbosity": 0}
        opt_level, _, format = level.partition("+")
        amp.initialize(model, optimizer, opt_level=opt_level, dtype=format or None, **options)

    def loss() -> Tensor:
        with torch.autocast("cpu", task.dtype, enabled=level == "autocast"):
            return F.cross_entropy(model(inputs).float(), targets)

    def step() -> None:
        optimizer.zero_grad()
        if cpu_half:
            with amp.scale_loss(F.cross_entropy(model(inputs), targets), optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss().backward()
        optimizer.step()

    return step, (lambda: F.cross_entropy(model(inputs), targets)) if cpu_half else loss


def saved_bytes(forward: Callable[[], Tensor]) -> int:
    """Return the bytes of the storages that autograd saves in a forward, parameters included, each counted once."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = forward()  # the graph references the storages, so that no address is used twice
    del kept
    return sum(storages.values())


def work(task: Task, pipe: Any) -> None:
    """Run in the process of a way: send its saved bytes, then the time of a step for each message, until None."""
    torch.set_num_threads(task.threads)
    step, forward = stepper(task)
    pipe.send(saved_bytes(forward))
    while pipe.recv() is not None:
        pipe.send(timing.on_cpu(step, 1))


class Process:
    """The process of one way, which waits between its turns."""

    def __init__(self, task: Task) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._worker = context.Process(target=work, args=(task, theirs))
        self._worker.start()
        theirs.close()
        self.saved: int = self._pipe.recv()

    def turn(self) -> float:
        """Return the microseconds of one step."""
        self._pipe.send(True)
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(None)
        self._worker.join()


def compare(options: argparse.Namespace, model: str, dtype: str) -> list[dict[str, Any]]:
    """Return a row for each way, with its time and its saved bytes relative to FP32's."""
    if dtype in DTYPES:
        natives = ("autocast", *(f"{level} native" for level in LEVELS[dtype])) if options.native else ()
        ways = ("fp32", *(f"{level} emulate" for level in LEVELS[dtype]), *natives)
    else:
        ways = ("fp32", *(f"{level} auto" for level in LEVELS[dtype]))
    with ExitStack() as stack:
        tasks = {way: Task(way, DTYPES.get(dtype, torch.bfloat16), model, options.threads) for way in ways}
        processes = {way: stack.enter_context(closing(Process(task))) for way, task in tasks.items()}
        times = timing.in_turns({way: process.turn for way, process in processes.items()}, options.repeats)
        return [
            {
                "model": model,
                "dtype": dtype,
                "way": way,
                "milliseconds": statistics.median(times[way]) / 1e3,
                "ratio": timing.ratio(times[way], times["fp32"]),
                "saved": process.saved / processes["fp32"].saved,
            }
            for way, process in processes.items()
        ]


def main() -> None:
    parser = timing.parser(__doc__, repeats=15)
    parser.add_argument("--dtype", nargs="+", choices=LEVELS, default=tuple(DTYPES))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=tuple(MODELS))
    parser.add_argument("--native", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    cap = os.environ.get("ONEDNN_MAX_CPU_ISA")
    found = ", ".join(f"{'' if has_arithmetic(dtype) else 'no '}{name} arithmetic" for name, dtype in DTYPES.items())
    print(timing.heading(options))
    print(f"this CPU{f', held to {cap},' if cap else ''} has {found}; time of a step over that of FP32")
    widths = {"model": -13, "dtype": -6, "way": -23, "milliseconds": 13, "ratio": 7, "saved": 7}
    print(timing.line(list(widths), widths))
    rows = []
    for model in options.models:
        for dtype in options.dtype:
            for row in compare(options, model, dtype):
                rows.append(row)
                print(timing.line([*row.values()], widths), flush=True)
    timing.write_json(options, rows)


if __name__ == "__main__":
    main()

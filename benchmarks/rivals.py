"""Time AdamW over ten tensors of 2^20 elements: torch's ways, other packages' optimizers and the levels, in turns.

`ratio` is the CPU time of a rival over that of torch's composition: copy the BF16 gradients into FP32 ones, take the
fused step on FP32 masters, copy these into the BF16 weights. A run begins with the gradients that a backward has left,
and ends when they are cleared. `bytes` is the most that torch's allocator has given out at once while the optimizer
steps, per parameter. `guarantee` is what the optimizer does with updates that are too small for the weights' type:

    exact masters   the weights are FP32, or have FP32 masters to the bit: no update is lost
    compensated     a second number for each weight keeps what rounding cut off: few updates are lost
    unbiased        stochastic rounding: no update is lost in the mean
    updates lost    rounding to nearest: an update below half of the weight's last bit is lost

A rival that does not run on this machine is named with the reason. `make rivals` installs the packages.

    python benchmarks/rivals.py [--threads 1] [--repeats N] [--only NAME ...] [--elements N] [--json PATH]
"""

from __future__ import annotations

import importlib.metadata
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import timing
import torch
from optimizer import ADAMW, AmpPatch, ByHand, Given, Rival, Work, bytes_at_step, given
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_patch import amp
from amp_patch.environment import named_level

EXACT, COMPENSATED, UNBIASED, LOST = "exact masters", "compensated", "unbiased", "updates lost"
LR, DECAY = 1e-4, 1e-2
COUNT = 10
REFERENCE = "torch composition, fused"
PACKAGES = ("torch", "torchao", "torch-optimi", "bitsandbytes", "deepspeed", "flashoptim")
WIDTHS = {"rival": -40, "ratio": 7, "ns": 7, "bytes": 8, "  guarantee": -16}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

Make = Callable[[Work, list[Tensor]], Rival]


class Plain(Rival):
    """An optimizer on the weights themselves, in the type of the gradients."""

    def __init__(self, work: Work, weights: list[Tensor], dtype: torch.dtype) -> None:
        self.weights = [nn.Parameter(weight.to(dtype, copy=True)) for weight in weights]
        self.optimizer = work.optimizer(self.weights)

    def begin(self, gradients: list[Tensor]) -> None:
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient

    def step(self) -> None:
        self.optimizer.step()

    def clear(self) -> None:
        self.optimizer.zero_grad()


class Compiled(Rival):
    """The composition as one function of a parameter, compiled by Inductor."""

    def __init__(self, _work: Work, weights: list[Tensor]) -> None:
        self.weights = [nn.Parameter(weight.to(BF16)) for weight in weights]
        self.held = [(weight.clone(), torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]
        self.count = 0
        self.compiled = torch.compile(_adamw, fullgraph=True, dynamic=False)

    def begin(self, gradients: list[Tensor]) -> None:
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient

    @torch.no_grad()
    def step(self) -> None:
        self.count += 1
        corrections = [torch.tensor(1 - beta**self.count) for beta in (0.9, 0.999)]
        for weight, held in zip(self.weights, self.held, strict=True):
            self.compiled(weight.detach(), weight.grad, *held, *corrections)

    def clear(self) -> None:
        for weight in self.weights:
            weight.grad = None


def _adamw(weight: Tensor, grad: Tensor, master: Tensor, m: Tensor, v: Tensor, first: Tensor, second: Tensor) -> None:
    grad = grad.float()
    master.mul_(1 - LR * DECAY)
    m.lerp_(grad, 0.1)
    v.mul_(0.999).addcmul_(grad, grad, value=0.001)
    master.sub_(LR * (m / first) / ((v / second).sqrt() + 1e-8))
    weight.copy_(master)


class Level(AmpPatch):
    """A level or a rung of amp_patch, by the public calls of a training script."""

    def __init__(self, work: Work, weights: list[Tensor], level: str) -> None:
        model: Any = nn.Module()
        model.weights = nn.ParameterList(weight.clone() for weight in weights)
        named = named_level(level)
        self.model, self.optimizer = amp.initialize(
            model, work.optimizer(model.parameters()), opt_level=named.level, verbosity=0, **named.options
        )
        self.weights = list(self.model.parameters())
        self.loss = torch.zeros(())


class Case(NamedTuple):
    guarantee: str
    make: Make
    optimizer: Callable[[], Callable[..., Optimizer]]  # imports the package
    gradients: torch.dtype = BF16


def _torchs(**options: Any) -> Callable[[], Callable[..., Optimizer]]:
    return lambda: partial(ADAMW, **{"lr": LR, "weight_decay": DECAY, **options})


def _deepspeed() -> Callable[..., Optimizer]:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return partial(DeepSpeedCPUAdam, lr=LR, weight_decay=DECAY)


def _optimi() -> Callable[..., Optimizer]:
    from optimi import AdamW

    return partial(AdamW, lr=LR, weight_decay=DECAY)


def _torchao(name: str, rounds: bool) -> Callable[..., Optimizer]:
    from torchao import optim

    return partial(getattr(optim, name), lr=LR, weight_decay=DECAY, bf16_stochastic_round=rounds)


def _bitsandbytes() -> Callable[..., Optimizer]:
    import bitsandbytes

    return partial(bitsandbytes.optim.AdamW8bit, lr=LR, weight_decay=DECAY)


def _flashoptim() -> Callable[..., Optimizer]:
    from flashoptim import FlashAdamW

    return partial(FlashAdamW, lr=LR, weight_decay=DECAY)


def _plain(dtype: torch.dtype) -> Make:
    return partial(Plain, dtype=dtype)


_composition: Make = partial(ByHand, kind="bf16")
CASES = {
    REFERENCE: Case(EXACT, _composition, _torchs()),
    "torch composition, foreach": Case(EXACT, _composition, _torchs(fused=False, foreach=True)),
    "torch composition, for-loop": Case(EXACT, _composition, _torchs(fused=False, foreach=False)),
    "torch composition, torch.compile": Case(EXACT, Compiled, _torchs()),
    "torch fused, FP32": Case(EXACT, _plain(FP32), _torchs(), FP32),
    "torch fused, BF16": Case(LOST, _plain(BF16), _torchs()),
    "DeepSpeedCPUAdam, FP32": Case(EXACT, _plain(FP32), _deepspeed, FP32),
    "DeepSpeedCPUAdam, composition": Case(EXACT, _composition, _deepspeed),
    "DeepSpeedCPUAdam, BF16": Case(LOST, _plain(BF16), _deepspeed),
    "optimi AdamW, BF16, Kahan": Case(COMPENSATED, _plain(BF16), _optimi),
    "torchao AdamW8bit, FP32": Case(EXACT, _plain(FP32), partial(_torchao, "AdamW8bit", False), FP32),
    "torchao AdamW8bit, BF16, stochastic": Case(UNBIASED, _plain(BF16), partial(_torchao, "AdamW8bit", True)),
    "torchao AdamWFp8, BF16, stochastic": Case(UNBIASED, _plain(BF16), partial(_torchao, "AdamWFp8", True)),
    "bitsandbytes AdamW8bit, FP32": Case(EXACT, _plain(FP32), _bitsandbytes, FP32),
    "bitsandbytes AdamW8bit, BF16": Case(LOST, _plain(BF16), _bitsandbytes),
    "FlashAdamW, BF16": Case(COMPENSATED, _plain(BF16), _flashoptim),
    "amp_patch O0": Case(EXACT, partial(Level, level="O0"), _torchs(), FP32),
    "amp_patch O2": Case(EXACT, partial(Level, level="O2"), _torchs(), FP16),
    "amp_patch O5": Case(EXACT, partial(Level, level="O5"), _torchs()),
    "amp_patch O5+split": Case(EXACT, partial(Level, level="O5+split"), _torchs()),
    "amp_patch O5+8bit": Case(EXACT, partial(Level, level="O5+8bit"), _torchs()),
    "amp_patch O5+split+8bit": Case(EXACT, partial(Level, level="O5+split+8bit"), _torchs()),
    "amp_patch O5+stochastic": Case(UNBIASED, partial(Level, level="O5+stochastic"), _torchs()),
    "amp_patch O5+stochastic+8bit": Case(UNBIASED, partial(Level, level="O5+stochastic+8bit"), _torchs()),
}


class Ready(NamedTuple):
    bytes: float
    run: timing.Timer


def prepare(case: Case, options: Any) -> Ready:
    """Return a rival that has taken its first steps, and its peak bytes; raise what its package raises."""
    start = given([(options.elements,)] * COUNT, case.gradients, "cpu")
    work = Work(lambda _size: [], case.optimizer())
    held = bytes_at_step(lambda: case.make(work, start.weights), start)
    rival = case.make(work, start.weights)
    return Ready(held, cpu_timer(rival, start))


def cpu_timer(rival: Rival, start: Given) -> timing.Timer:
    """Return a timer of `rival.finish` in CPU time of the process."""

    def run() -> float:
        rival.begin([gradient.clone() for gradient in start.gradients])
        before = time.process_time()
        rival.finish(clips=False)
        return (time.process_time() - before) * 1e6

    return run


def versions() -> dict[str, str]:
    """Return package -> installed version, of the packages that are here."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = timing.parser(__doc__, repeats=15)
    parser.set_defaults(threads=1)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help="%(choices)s")
    parser.add_argument("--elements", type=int, default=2**20, help="of each of the ten tensors")
    options = parser.parse_args()
    if options.device != "cpu":
        parser.error(f"--device {options.device}: rivals.py measures CPU time; leave the option out")
    torch.set_num_threads(options.threads)
    options.versions, options.date = versions(), time.strftime("%Y-%m-%d")
    ready, refused = {}, {}
    for name in dict.fromkeys([REFERENCE, *options.only]):
        try:
            ready[name] = prepare(CASES[name], options)
        except Exception as error:  # of another package, or of its compiler
            refused[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[:160]
    times = timing.in_turns({name: one.run for name, one in ready.items()}, options.repeats)
    rows = []
    print(timing.heading(options), *(f"{name} {version}" for name, version in options.versions.items()), sep="; ")
    print(timing.line(list(WIDTHS), WIDTHS))
    for name, one in ready.items():
        nanoseconds = statistics.median(times[name]) * 1e3 / (COUNT * options.elements)
        ratio = timing.ratio(times[name], times[REFERENCE])
        cells = [name, ratio, nanoseconds, one.bytes, f"  {CASES[name].guarantee}"]
        print(timing.line(cells, WIDTHS))
        rows.append(dict(zip(("rival", "ratio", "ns", "bytes", "guarantee"), cells, strict=True)))
        rows[-1]["guarantee"] = CASES[name].guarantee
    for name, reason in refused.items():
        print(f"{name}: does not run here: {reason}")
        rows.append({"rival": name, "guarantee": CASES[name].guarantee, "refused": reason})
    timing.write_json(options, rows)


if __name__ == "__main__":
    main()

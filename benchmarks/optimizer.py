"""Time the part of a step from the end of backward to the next forward, at O2 and with torch's own functions.

This part unscales and checks the gradients, steps, rounds the FP32 masters into the half-precision weights and clears
the gradients. `torch` uses as few passes as torch's own functions allow. It copies the gradients into existing FP32
gradients, unscales and checks them if the loss is scaled, steps on the masters, and copies these into the weights.
`amp_patch` is the exit of `scale_loss`, `optimizer.step()` and `optimizer.zero_grad()` of a model at O2. Both begin
with the same half-precision gradients, without a backward.

`ratio` is our time over torch's. `clipped` is this ratio with clip_grad_norm_ before the step, and `clip adds` the time
of the clipping relative to a step without it. `bytes` is the most that torch's allocator has given out at once while
the optimizer steps, per parameter: weights, gradients, masters, optimizer state, temporaries. (FP32 training with AdamW
has 16.) The type `split` is BF16 with split masters on our side; `stochastic` is BF16 without masters, with stochastic
rounding. With `+8bit` the optimizer's state is in eight bits, and `FP32` is our time over our time with FP32 state.

    python benchmarks/optimizer.py [--threads N] [--device cuda] [--repeats N] [--size full|tiny] [--only "gpt AdamW"]
                                   [--dtypes bf16 fp16 split split+8bit stochastic stochastic+8bit] [--json PATH]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import timing
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, NAdam, Optimizer, RMSprop

from amp_patch import amp

CLOSED = ("split", "stochastic")  # types that set `master_weights`
CODED = "+8bit"  # suffix of a type that sets `optimizer_state`
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES |= {name + coded: torch.bfloat16 for name in CLOSED for coded in ("", CODED)}
MAX_NORM = 1.0
INITIAL_SCALE = 2.0**16  # the loss scale for FP16
WIDTHS = dict(
    [("work", -21), ("dtype", -16), ("torch ms", 9), ("amp_patch ms", 13), ("ratio", 7), ("FP32", 6), ("clipped", 9)],
    **{"clip adds: torch": 18, "amp_patch": 10, "bytes: torch": 14, " amp_patch": 10},
)

Shapes = list[tuple[int, ...]]


class Size(NamedTuple):
    width: int  # of the GPT, which has six blocks
    vocabulary: int
    length: int
    count: int  # of the small tensors
    elements: int  # of the one large tensor


SIZES = {"full": Size(544, 2048, 512, 4000, 50_000_000), "tiny": Size(8, 16, 8, 20, 1000)}


def gpt(size: Size) -> Shapes:
    """Return the shapes of a GPT's 74 tensors, which have 22.7 M elements at full size."""
    width = size.width
    vectors = [(width,)] * 6 + [(3 * width,), (4 * width,)]
    block = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width), *vectors]
    return [(size.vocabulary, width), (size.length, width), *block * 6]


class Work(NamedTuple):
    shapes: Callable[[Size], Shapes]
    optimizer: Callable[[Any], Optimizer]
    clips: bool = False


ADAMW = partial(AdamW, lr=1e-4, fused=True)
WORKS = {
    "gpt AdamW": Work(gpt, ADAMW, clips=True),
    "gpt SGD": Work(gpt, partial(SGD, lr=1e-4, momentum=0.9, fused=True), clips=True),
    "gpt NAdam": Work(gpt, partial(NAdam, lr=1e-4, foreach=True)),
    "gpt RMSprop": Work(gpt, partial(RMSprop, lr=1e-4, foreach=True)),
    "4,000 of 256 AdamW": Work(lambda size: [(256,)] * size.count, ADAMW),
    "one of 50 M AdamW": Work(lambda size: [(size.elements,)], ADAMW),
}
if hasattr(torch.optim, "Muon"):  # of matrices alone; at full size a step takes seconds
    WORKS["matrices Muon"] = Work(
        lambda size: [shape for shape in gpt(size) if len(shape) == 2], partial(torch.optim.Muon, lr=1e-4)
    )


class Rival:
    """A model's parameters and their optimizer. `begin` stands for backward; `gather`, `step` and `clear` follow it."""

    weights: list[Tensor]  # the half ones

    def begin(self, gradients: list[Tensor]) -> None: ...
    def gather(self) -> None: ...
    def clip(self) -> None: ...
    def step(self) -> None: ...
    def clear(self) -> None: ...

    def finish(self, clips: bool) -> None:
        """Run the timed part of a step."""
        self.gather()
        if clips:
            self.clip()
        self.step()
        self.clear()


class ByHand(Rival):
    """Torch's own functions on lists of tensors."""

    def __init__(self, work: Work, weights: list[Tensor], kind: str) -> None:
        dtype = DTYPES[kind]
        self.masters = [nn.Parameter(weight.clone()) for weight in weights]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.grads = [master.grad for master in self.masters]
        self.weights = [nn.Parameter(weight.to(dtype)) for weight in weights]
        self.optimizer = work.optimizer(self.masters)
        self.scales = dtype is torch.float16
        device = weights[0].device
        self.scale, self.found_inf = torch.full((1,), INITIAL_SCALE, device=device), torch.zeros(1, device=device)
        self.clean_steps = torch.zeros(1, dtype=torch.int32, device=device)

    def begin(self, gradients: list[Tensor]) -> None:
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient

    @torch.no_grad()
    def gather(self) -> None:
        torch._foreach_copy_(self.grads, [weight.grad for weight in self.weights])
        for weight in self.weights:
            weight.grad = None
        if self.scales:
            self.found_inf.zero_()
            torch._amp_foreach_non_finite_check_and_unscale_(self.grads, self.found_inf, self.scale.reciprocal())
            torch._amp_update_scale_(self.scale, self.clean_steps, self.found_inf, 2.0, 0.5, 2000)

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.masters, MAX_NORM)

    @torch.no_grad()
    def step(self) -> None:
        if self.scales and self.found_inf.item():
            return
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.masters)


class AmpPatch(Rival):
    """The public calls of a training script at O2."""

    def __init__(self, work: Work, weights: list[Tensor], kind: str) -> None:
        model = nn.Module()
        model.weights = nn.ParameterList(weight.clone() for weight in weights)
        optimizer = work.optimizer(model.parameters())
        masters = kind.removesuffix(CODED)
        options = {"dtype": DTYPES[kind], "master_weights": masters if masters in CLOSED else None}
        options |= {"optimizer_state": "8bit"} if kind.endswith(CODED) else {}
        self.model, self.optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, **options)
        self.weights = list(self.model.parameters())
        self.loss = torch.zeros((), device=weights[0].device)

    def begin(self, gradients: list[Tensor]) -> None:
        self.backward = amp.scale_loss(self.loss, self.optimizer)
        self.backward.__enter__()
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient

    def gather(self) -> None:
        self.backward.__exit__(None, None, None)

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(amp.master_params(self.optimizer), MAX_NORM)

    def step(self) -> None:
        self.optimizer.step()

    def clear(self) -> None:
        self.optimizer.zero_grad()


RIVALS: dict[str, Callable[..., Rival]] = {"torch": ByHand, "amp_patch": AmpPatch}


class Given(NamedTuple):
    """The weights and gradients that all rivals begin with."""

    weights: list[Tensor]  # FP32
    gradients: list[Tensor]  # half precision; for FP16 they are gradients of the scaled loss


def given(shapes: Shapes, dtype: torch.dtype, device: str) -> Given:
    torch.manual_seed(0)
    weights = [torch.randn(shape, device=device) for shape in shapes]
    factor = 2.0**-8 * (INITIAL_SCALE if dtype is torch.float16 else 1.0)  # large enough for a norm that is clipped
    gradients = [(torch.randn_like(weight) * factor).to(dtype) for weight in weights]
    return Given(weights, gradients)


def timer(rival: Rival, start: Given, device: str, clips: bool) -> timing.Timer:
    """Return a timer of `rival.finish`. Each run begins with new copies of the gradients, as after a backward."""
    finish = timing.timer(lambda: rival.finish(clips), device)

    def run() -> float:
        rival.begin([gradient.clone() for gradient in start.gradients])
        if device != "cpu":
            torch.cuda.synchronize()
        return finish()

    return run


def bytes_at_step(make: Callable[[], Rival], start: Given) -> float:
    """Return the peak bytes per parameter in the optimizer's second step, in which it has its state."""
    mark = "the optimizer steps"

    def run() -> None:
        rival = make()
        for _ in range(2):
            rival.begin([gradient.clone() for gradient in start.gradients])
            rival.gather()
            with torch.profiler.record_function(mark):
                rival.step()
            rival.clear()

    return timing.most_bytes(run, mark) / sum(gradient.numel() for gradient in start.gradients)


def compare(name: str, options: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Return one row: both rivals on one work."""
    work = WORKS[name]
    start = given(work.shapes(SIZES[options.size]), DTYPES[dtype], options.device)
    makes = {rival: partial(make, work, start.weights, dtype) for rival, make in RIVALS.items()}
    held = {rival: bytes_at_step(make, start) for rival, make in makes.items()}
    if dtype.endswith(CODED):
        makes["FP32 state"] = partial(AmpPatch, work, start.weights, dtype.removesuffix(CODED))
    rivals = {rival: make() for rival, make in makes.items()}
    timers = {rival: timer(it, start, options.device, clips=False) for rival, it in rivals.items()}
    for run in timers.values():
        run()
    equal = statistics.mean(
        (ours == theirs).float().mean().item()
        for ours, theirs in zip(rivals["amp_patch"].weights, rivals["torch"].weights, strict=True)
    )
    if work.clips:  # with new rivals: after a clipped step, ours prepares for another clipped step
        clipping = {rival: timer(makes[rival](), start, options.device, clips=True) for rival in RIVALS}
        for run in clipping.values():
            run()
        timers |= {f"{rival} clipped": run for rival, run in clipping.items()}
    times = timing.in_turns(timers, options.repeats)
    row: dict[str, Any] = {"work": name, "dtype": dtype}
    row |= {f"{rival} ms": statistics.median(times[rival]) / 1e3 for rival in RIVALS}
    row["ratio"] = timing.ratio(times["amp_patch"], times["torch"])
    row["FP32"] = timing.ratio(times["amp_patch"], times["FP32 state"]) if "FP32 state" in times else "-"
    row["clipped"] = timing.ratio(times["amp_patch clipped"], times["torch clipped"]) if work.clips else "-"
    for rival in RIVALS:
        row[f"{rival} clip adds"] = timing.ratio(times[f"{rival} clipped"], times[rival]) - 1 if work.clips else "-"
    row |= {f"{rival} bytes": held[rival] for rival in RIVALS}
    return row | {"weights equal": equal}


def main() -> None:
    parser = timing.parser(__doc__, repeats=15)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=WORKS,
        default=[work for work in WORKS if "Muon" not in work],
        metavar="WORK",
        help="%(choices)s",
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    options = parser.parse_args()
    timing.measure(
        options, WIDTHS, (compare(name, options, dtype) for name in options.only for dtype in options.dtypes)
    )


if __name__ == "__main__":
    main()

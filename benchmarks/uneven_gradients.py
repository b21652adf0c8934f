"""Compare eight-bit with FP32 optimizer state if the gradients in a block of 256 elements differ in magnitude.

    python benchmarks/uneven_gradients.py [--repeats N] [--json PATH]    # two minutes

All elements of a block share a scale. AdamW steps one weight of 64 x 64 at O0, in which a block is four rows. In the
first two cases the odd rows have the smaller gradients:

- outputs with a small share of the loss, in a linear regression; the figure is their held-out loss;
- rows whose gradients begin at step 100, and rows that have a gradient once in 400 steps; the figure is the largest
  update of one step, in learning rates;
- one large element in each block, for 3,000 steps; the figure is the mean ratio of the other elements' second moment
  to the one with FP32 state, or, with amsgrad, of the running maximum.

A row of the table has the figure with FP32 state and with eight-bit state, each the mean over the seeds (`--repeats`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import timing
import torch
from torch import Tensor, nn

from amp_patch import amp

SIDE = 64
SMALL = slice(1, None, 2)  # the odd rows
NOISE = 0.1  # standard deviation of the noise in the regression's targets; its square is the least possible loss

Gradients = Iterator[Tensor]
Source = Callable[[Tensor], Gradients]  # from the weight to its gradients


class Trained(NamedTuple):
    """The result of training a weight, from zeros, by AdamW.

    Attributes:
        weight: the weight at the end.
        largest_update: the largest update of an element of the odd rows in one step, in learning rates.
        state: the optimizer's state in FP32, from `state_dict()`.
    """

    weight: Tensor
    largest_update: float
    state: dict[str, Tensor]


def trained(gradients: Source, state: str | None, level: str = "O0", **adam: Any) -> Trained:
    """Train a weight with these gradients by AdamW, whose state is FP32 if `state` is None, or "8bit"."""
    model: Any = nn.Linear(SIDE, SIDE, bias=False)
    nn.init.zeros_(model.weight)
    settings = {"lr": 1e-3, "weight_decay": 0.0, "fused": True} | adam
    optimizer: Any = torch.optim.AdamW(model.parameters(), **settings)
    level, _, masters = level.partition("+")
    options = {"master_weights": masters or None, "optimizer_state": state, "verbosity": 0}
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, **options)
    (master,) = amp.master_params(optimizer)
    largest, before = 0.0, torch.zeros(SIDE, SIDE)
    with torch.no_grad():
        for gradient in gradients(model.weight):
            with amp.scale_loss(torch.zeros(()), optimizer):
                model.weight.grad = gradient.to(model.weight.dtype)
            optimizer.step()
            optimizer.zero_grad()
            after = torch.zeros(SIDE, SIDE).add_(master)
            largest = max(largest, (after - before)[SMALL].abs().max().item())
            before = after
    found = optimizer.state_dict()["state"][0]
    amp.restore()
    return Trained(before, largest / settings["lr"], found)


def regression(share: float, steps: int, seed: int) -> tuple[Tensor, Source]:
    """Return the true weight of a linear regression, and its gradients. The loss weighs the odd outputs by `share`."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(SIDE, SIDE, generator=generator) / 8
    shares = torch.ones(SIDE)
    shares[SMALL] = share

    def gradients(weight: Tensor) -> Gradients:
        for _ in range(steps):
            inputs = torch.randn(32, SIDE, generator=generator)
            targets = inputs @ truth.T + NOISE * torch.randn(32, SIDE, generator=generator)
            yield (2 / inputs.numel()) * ((inputs @ weight.float().T - targets) * shares).T @ inputs

    return truth, gradients


def held_out_loss(share: float, state: str | None, steps: int = 1500, seed: int = 0, level: str = "O0") -> float:
    """Return the mean squared error of the odd outputs on inputs of variance 1, not weighed by their share."""
    truth, gradients = regression(share, steps, seed)
    weight = trained(gradients, state, level).weight
    return NOISE**2 + (weight - truth)[SMALL].square().sum(1).mean().item()


def rows(steps: int, has_gradient: Callable[[int], bool], size: float = 1.0, seed: int = 0) -> Source:
    """Return gradients of noise. Those of the odd rows are scaled by `size` at some steps, and 0 at the others."""

    def gradients(_: Tensor) -> Gradients:
        generator = torch.Generator().manual_seed(seed)
        for step in range(steps):
            gradient = torch.randn(SIDE, SIDE, generator=generator)
            gradient[SMALL] *= size if has_gradient(step) else 0.0
            yield gradient

    return gradients


def late_rows(steps: int = 250, seed: int = 0) -> Source:
    return rows(steps, lambda step: step >= 100, 1e-2, seed)


def rare_rows(steps: int = 1500, seed: int = 0) -> Source:
    return rows(steps, lambda step: step % 400 == 5, seed=seed)


def one_large(steps: int = 3000, seed: int = 0) -> Source:
    """Return gradients around 1 for one element of each block. Those of the others fall to 1e-3 after ten steps."""

    def gradients(_: Tensor) -> Gradients:
        generator = torch.Generator().manual_seed(seed)
        for step in range(steps):
            gradient = torch.randn(SIDE * SIDE, generator=generator) * (1.0 if step < 10 else 1e-3)
            gradient[::256] = 1 + 0.1 * torch.randn(SIDE * SIDE // 256, generator=generator)
            yield gradient.view(SIDE, SIDE)

    return gradients


def ratio(name: str, gradients: Source, **adam: Any) -> Tensor:
    """Return the ratio of an eight-bit state to the FP32 state, for all elements except the large ones."""
    ours, wanted = (trained(gradients, state, **adam).state[name].view(-1, 256)[:, 1:] for state in ("8bit", None))
    return ours / wanted


def both(figure: Callable[[str | None], float]) -> tuple[float, float]:
    return figure(None), figure("8bit")


def update(source: Callable[..., Source], seed: int) -> tuple[float, float]:
    return both(lambda state: trained(source(seed=seed), state).largest_update)


def of_one_large(name: str, seed: int, **adam: Any) -> tuple[float, float]:
    return 1.0, ratio(name, one_large(seed=seed), **adam).mean().item()


LOSS, UPDATE = "held-out loss", "largest update, in learning rates"
# Name of a case -> the name of its figure, and a function of the seed that returns it with FP32 and eight-bit state.
CASES: dict[str, tuple[str, Callable[[int], tuple[float, float]]]] = {
    **{
        f"outputs with {share:g} of the loss": (
            LOSS,
            lambda seed, share=share: both(lambda state: held_out_loss(share, state, seed=seed)),
        )
        for share in (1e-2, 1e-3, 1e-4, 1e-5)
    },
    "rows that begin at step 100": (UPDATE, partial(update, late_rows)),
    "rare rows, once in 400 steps": (UPDATE, partial(update, rare_rows)),
    **{
        f"one large element, beta2 {beta2}": (
            "second moment over FP32's",
            lambda seed, beta2=beta2: of_one_large("exp_avg_sq", seed, betas=(0.9, beta2)),
        )
        for beta2 in (0.999, 0.95)
    },
    "the same with amsgrad, beta2 0.99": (
        "running maximum over FP32's",
        lambda seed: of_one_large("max_exp_avg_sq", seed, betas=(0.9, 0.99), amsgrad=True),
    ),
}
HEADS = ["gradients of one block", "figure", "FP32", "8 bits"]


def measure(name: str, seeds: int) -> dict[str, Any]:
    """Return one row of the table."""
    figure, of_seed = CASES[name]
    fp32, coded = zip(*map(of_seed, range(seeds)), strict=True)
    return {"case": name, "figure": figure, "FP32": statistics.mean(fp32), "8bit": statistics.mean(coded)}


def cells(row: dict[str, Any]) -> list[str]:
    """Format a row for the table of the page."""
    return [row["case"], row["figure"], f"{row['FP32']:#.3g}", f"{row['8bit']:#.3g}"]


def main() -> None:
    options = timing.parser(__doc__, repeats=3).parse_args()
    torch.set_num_threads(options.threads)
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}", flush=True)
    found = []
    for name in CASES:
        found.append(row := measure(name, options.repeats))
        print(f"| {' | '.join(cells(row))} |", flush=True)
        timing.write_json(options, found)


if __name__ == "__main__":
    main()

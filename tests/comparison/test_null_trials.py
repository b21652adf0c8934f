"""Comparisons with a known answer: FP32 against FP32 with another order of sums, and with a planted gap."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
from compared_runs import compare

from amp_patch.comparison.comparison import Comparison
from amp_patch.diagnose.recording.run import Run

TRIALS = 100
INPUTS, HIDDEN, CLASSES, BATCH, SEEN, HELD_OUT = 24, 32, 8, 16, 256, 512
PLANTED = 0.006
# Where the runs of a pair go: together; apart by what chance makes of rounding; a little apart, or as far as runs of
# two seeds, from the first step on. Steps, learning rate, dropout.
REGIMES = {
    "calm": (60, 0.05, 0.0),
    "chaotic": (200, 0.2, 0.0),
    "a little dropout": (60, 0.05, 0.002),
    "other dropout": (120, 0.1, 0.5),
}


def drawn(seeds: range, what: int, *shape: int, draw=torch.randn) -> torch.Tensor:
    """Random numbers of each seed, that are the same whichever others are drawn beside them."""
    return torch.stack([draw(*shape, generator=torch.Generator().manual_seed(100 * seed + what)) for seed in seeds])


def train(seeds: range, steps: int, lr: float, dropout: float, *, reordered: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Small nets that learn noisy labels, one a seed, all at once: the losses of their steps, those on held-out data.

    Reordered sums run over the same products in another order, with another stream of dropout.
    """
    fixed = torch.Generator().manual_seed(0)
    teacher = torch.randn(INPUTS, CLASSES, generator=fixed)
    inputs = torch.randn(SEEN + HELD_OUT, INPUTS, generator=fixed)
    labels = (inputs @ teacher + 3 * torch.randn(len(inputs), CLASSES, generator=fixed)).argmax(1)
    orders = [torch.randperm(n, generator=fixed) if reordered else torch.arange(n) for n in (INPUTS, HIDDEN)]
    first = (drawn(seeds, 1, INPUTS, HIDDEN) / INPUTS**0.5).requires_grad_()
    last = (drawn(seeds, 2, HIDDEN, CLASSES) / HIDDEN**0.5).requires_grad_()
    batches = (drawn(seeds, 3, steps, BATCH, draw=torch.rand) * SEEN).long()
    kept = drawn(seeds, 4 + reordered, steps, 1, HIDDEN, draw=torch.rand) >= dropout if dropout else None
    optimizer = torch.optim.SGD([first, last], lr=lr, momentum=0.9)

    def losses(inputs: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        hidden = torch.relu(inputs[..., orders[0]] @ first[:, orders[0]])
        if mask is not None:
            hidden = hidden * mask / (1 - dropout)
        outputs = hidden[..., orders[1]] @ last[:, orders[1]]
        return torch.nn.functional.cross_entropy(outputs.transpose(1, 2), labels, reduction="none").mean(1)

    curve = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        loss = losses(inputs[batches[:, step]], labels[batches[:, step]], None if kept is None else kept[:, step])
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
        curve.append(loss.detach())
    with torch.no_grad():
        some = slice(SEEN, None)
        held = losses(inputs[some].expand(len(seeds), -1, -1), labels[some].expand(len(seeds), -1), None)
    return torch.stack(curve, 1), held


def comparisons(regime: str, seeds: int, planted: float = 0.0) -> list[Comparison]:
    """Make TRIALS comparisons. The second level is the first with another order of sums, and `planted` above it."""
    steps, lr, dropout = REGIMES[regime]
    every = range(TRIALS * seeds)
    levels = {name: train(every, steps, lr, dropout, reordered=name != "O0") for name in ("O0", "O4")}
    made = []
    for trial in range(TRIALS):
        groups = []
        for name, (curves, held) in levels.items():
            of_trial = range(trial * seeds, (trial + 1) * seeds)
            runs = [Run(name, place, loss=curves[i].tolist()) for place, i in enumerate(of_trial)]
            for run, i in zip(runs, of_trial, strict=True):
                run.logged = {"held_out_loss": [(steps, held[i].item() + planted * (name != "O0"))]}
            groups.append(runs)
        made.append(compare(*groups, metric="held_out_loss"))
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("regime", "seeds"), [*((regime, 3) for regime in REGIMES), ("other dropout", 5)])
def test_equal_trainings_are_rarely_judged_worse(regime, seeds):
    began = time.perf_counter()
    found = [each.levels[1].finding for each in comparisons(regime, seeds)]
    kinds = Counter(each.kind + " by range" * each.by_range for each in found)
    assert sum(each.rejected for each in found) <= 5, kinds
    if regime == "calm":
        assert kinds == {"within": TRIALS}, "rounding alone moves nothing here"
    if regime == "other dropout":
        assert sum(each.gap.decorrelated for each in found) > TRIALS / 2
    assert sum(each.usable for each in found) > (0.7 if regime == "other dropout" else 0.9) * TRIALS
    print(f"{regime}, {seeds} seeds: {dict(kinds)}; {time.perf_counter() - began:.1f} s")


@pytest.mark.slow
def test_a_planted_gap_is_judged_worse():
    """0.006 nats, a twentieth of the range of O0's five seeds, and 0.34 % of the loss."""
    began = time.perf_counter()
    certain = [each.levels[1].finding for each in comparisons("calm", 3, PLANTED)]
    assert all(each.rejected and each.gap.told == "worse" for each in certain)
    five, ten = comparisons("a little dropout", 5, PLANTED), comparisons("a little dropout", 10, PLANTED)
    ranges = [max(each.baseline.final) - min(each.baseline.final) for each in five]
    assert sorted(ranges)[TRIALS // 2] > 15 * PLANTED
    told = {len(each[0].baseline.runs): Counter(one.levels[1].finding.gap.told for one in each) for each in (five, ten)}
    print(f"0.006 planted: {told}; {time.perf_counter() - began:.1f} s")
    assert told[5]["as good"] <= 5 and told[10]["as good"] == 0
    assert sum(each.levels[1].finding.gap.is_loss for each in five) >= 0.95 * TRIALS
    assert told[10]["worse"] >= 0.8 * TRIALS
    none = Counter(each.levels[1].finding.gap.told for each in comparisons("a little dropout", 5))
    assert none["worse"] <= 5 and none["as good"] > TRIALS / 2

"""Verdicts that were wrong on public programs: collapses, chance taken for better, noise for a gain, rounded losses."""

from __future__ import annotations

import argparse
import random

import pytest
import torch
from compared_runs import compare, logs, made_up_run, seeds

from amp_patch import amp
from amp_patch.comparison import headline, measures, page, table
from amp_patch.comparison.commands import compare_arguments
from amp_patch.comparison.commands.report import comparison_of
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.plan import Plan
from amp_patch.diagnose.recording.run import Run

BASE = (0.70, 0.62, 0.81)


def test_a_level_with_collapsed_seeds_is_not_to_be_used():
    made = compare(seeds("O0", *BASE), seeds("O2", 50.0, 0.78, 51.0, ms=5))
    found, said = made.levels[1].finding, made.levels[1].verdict
    assert (found.kind, found.collapsed.seeds, found.usable) == ("differs", [0, 2], False)
    assert said.text.startswith(
        "do not use: collapsed with seeds 0 and 2: final loss 50.00 to 51.00, where O0's 3 seeds end at 0.6200 to "
        "0.8100: further off than 10 times their range, and than half of what O0's training gained; 2.0x faster"
    )
    assert "chance" not in said.text and made.summary == "Stay with O0: do not use O2 FP16."
    assert headline.in_short(made.levels[1], made) == "do not use: collapsed"
    assert said.reason == "collapsed with seeds 0 and 2: final loss 50.00 to 51.00"
    assert said.reason in page.html(made).replace("&#39;", "'")
    assert "collapsed with seeds 0 and 2" in " ".join(" ".join(table.lines(made)).split())


def test_a_collapse_is_beyond_ten_ranges_and_half_of_the_improvement():
    """O0 begins at 4 and ends at 0.62 to 0.81: ten ranges are 1.9, and half of the improvement is 1.595."""
    for last, kind in ((2.70, None), (2.72, [2])):
        found = compare(seeds("O0", *BASE), seeds("O2", 0.7, 0.8, last)).levels[1].finding
        assert (found.collapsed and found.collapsed.seeds) == kind
    narrow = (0.70, 0.70, 0.71)  # half of the improvement is 1.645
    for last, kind in ((2.35, None), (2.36, [2])):
        found = compare(seeds("O0", *narrow), seeds("O2", 0.7, 0.7, last)).levels[1].finding
        assert (found.collapsed and found.collapsed.seeds) == kind
    # A far better result is no collapse, and a far lower accuracy is one.
    assert compare(seeds("O0", *BASE), seeds("O2", -9.0, 0.7, 0.7)).levels[1].finding.collapsed is None
    accuracy = {"metric": "accuracy", "maximize": True}  # it is 0.125 at first: half of the improvement is 0.4125
    for last, kind in ((0.54, None), (0.53, [1])):
        found = compare(logs("O0", 0.96, 0.95), logs("O2", 0.955, last), **accuracy).levels[1].finding
        assert (found.collapsed and found.collapsed.seeds) == kind
    once = [made_up_run("O0", seed, logged={"accuracy": [(40, 0.95 + seed / 100)]}) for seed in range(2)]
    for last, kind in ((0.86, None), (0.84, [0])):
        level = made_up_run("O2", 0, logged={"accuracy": [(40, last)]})
        found = compare(once, [level], **accuracy).levels[1].finding
        assert (found.collapsed and found.collapsed.seeds) == kind
    # The sum of a GAN's losses says nothing.
    assert compare(seeds("O0", *BASE, objectives=2), seeds("O2", 50.0, 1.0, 1.0)).levels[1].finding.collapsed is None


def test_one_seed_collapses_beyond_the_range_of_its_curve():
    for last, kind in ((7.2, "undecided"), (7.4, "differs")):  # O0 goes from 4 to 0.7
        made = compare(seeds("O0", 0.7), seeds("O2", last))
        assert made.levels[1].finding.kind == kind
    assert "further above every loss of O0's than those lie apart" in made.levels[1].verdict.text
    assert compare(seeds("O0", 0.7, steps=9), seeds("O2", 99.0, steps=9)).levels[1].finding.unjudged == "few steps"


@pytest.mark.parametrize("gained", [0.0, 0.5, 3.0])
def test_ordinary_noise_is_no_collapse(gained):
    """Seeds of one normal distribution: 1000 comparisons of a training that gained nothing, something or much."""
    draws, collapses = random.Random(0), 0
    for _ in range(1000):
        groups = [
            [
                Run(level, seed, loss=[2.0 + gained + draws.gauss(0, 0.1), 2.0 + draws.gauss(0, 0.1)])
                for seed in range(3)
            ]
            for level in ("O0", "O2")
        ]
        collapses += compare(*groups).levels[1].finding.collapsed is not None
    assert collapses <= (5 if gained < 1 else 0)


def test_better_needs_the_same_test_as_worse():
    """Runs of ten steps. O2 skips two of them."""
    base = seeds("O0", 2.30, 2.29, 2.31, steps=10)
    level = seeds("O2", 2.25, 2.29, 2.22, steps=10, ms=5)
    for run in level:
        run.skipped = [True, True] + 8 * [False]
    made = compare(base, level)
    found = made.levels[1].finding
    assert (found.kind, found.better) == ("no worse", False)
    assert headline.gains(made) == "2.0x faster, same memory, no worse loss over 3 seeds"
    assert ", no worse: 2 % below O0's 2.300" in made.levels[1].verdict.text
    assert "which may be chance" in made.levels[1].verdict.text
    assert "level that did no worse than O0" in headline.why(made)
    assert (
        headline.outcome(compare(base, level, seeds("O1", 2.3, 2.3, 2.3, ms=1, steps=10)).levels[1], made) != "better"
    )
    shown = page.html(made)
    assert "better loss" not in shown and "better than" not in shown
    sure = compare(base, seeds("O2", 2.25, 2.24, 2.26, steps=10, ms=5))
    assert sure.levels[1].finding.better and headline.gains(sure).startswith("2.2 % better loss over 3 seeds, ")


def small(ms: tuple[float, ...], megabytes: float, process: float | None) -> Comparison:
    """O2 takes 7 MiB of tensors in place of 10 where `megabytes` is 7, in processes that hold `process` MiB."""
    peak = None if process is None else int(process * 2**20)
    fields = {"device": "cpu", "weights": 0, "gradients": 0, "state": 0, "peak_memory": peak}
    base = seeds("O0", 1.0, 1.25, 1.5, **fields, activations=10 * 2**20)
    level = seeds("O2", 1.25, 1.0, 1.5, **fields, activations=int(megabytes * 2**20))
    for run, each in zip(level, ms, strict=True):
        run.seconds = [each / 1000] * 40
    return compare(base, level)


def test_a_memory_gain_must_exceed_the_possible_loss_of_speed():
    noisy = (10 / 0.69, 10 / 0.9, 10 / 1.09)
    made = small(noisy, 7, process=None)  # it saves 30 % of the tensors, and may cost 45 % of the time
    assert made.recommended is made.baseline
    assert made.summary == (
        "Stay with O0: O2 FP16 (30 % less memory, 0.69x to 1.09x of its speed) would do as well, but may cost more "
        "time than it saves memory."
    )
    assert small((10 / 0.8, 10, 8), 7, process=None).summary.startswith("Use O2 FP16: 30 % less"), "30 % for 25 %"


@pytest.mark.parametrize(("megabytes", "used"), [(7, True), (9.4, True), (9.6, False)])
def test_a_memory_gain_is_a_share_of_the_training_memory(megabytes, used):
    """On a CPU the share of the whole process would be less: the memory of Python and torch does not grow."""
    made = small((10, 10, 10), megabytes, process=400)
    assert (made.recommended is not made.baseline) is used
    again = Comparison.from_dict({**made.to_dict(), "min_gain": 0.005})
    assert again.recommended is not again.baseline
    strict = Comparison.from_dict({**made.to_dict(), "min_gain": 0.31})
    assert strict.recommended is strict.baseline


class OwnLoss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(inputs), targets)


def train() -> None:
    """A model that returns its loss, in steps of two micro-batches."""
    model = OwnLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, verbosity=0)
    for _ in range(12):
        optimizer.zero_grad()
        for _ in range(2):
            with amp.scale_loss(model(torch.randn(16, 8), torch.randn(16, 4)), optimizer) as scaled:
                scaled.backward()
        optimizer.step()


def test_a_note_names_losses_recorded_in_a_low_type():
    made = amp.compare(train, ["O4", "O5"], seeds=2, verbosity=0)
    assert [measures.loss_type(level.runs) for level in made.levels] == [None, None, "bfloat16"]
    (note,) = [note for note in made.notes if "recorded in" in note]
    assert note.startswith("O5 BF16's losses were recorded in BF16: steps of 0.")
    assert note in repr(made) and note.replace("'", "&#39;") in page.html(made)


def test_rounded_losses_within_one_step_are_as_good():
    """Near 2.3 BF16 has steps of 1/64, 0.7 %."""
    base = seeds("O0", 2.300, 2.301, 2.302)
    finer, coarser = (2.309, 2.310, 2.312), (2.325, 2.326, 2.328)
    judged = [compare(base, seeds("O5", *each, dtype="bfloat16")).levels[1].finding.kind for each in (finer, coarser)]
    assert judged == ["differs", "differs"]
    rounded = [seeds("O5", *each, dtype="bfloat16", loss_types=["bfloat16"]) for each in (finer, coarser)]
    made = [compare(base, each) for each in rounded]
    assert [each.levels[1].finding.kind for each in made] == ["within", "differs"]
    assert made[0].notes == ["O5 BF16's losses were recorded in BF16: steps of 0.7 %"]
    assert "less than the steps of 0.7 % in which losses were recorded" in made[0].levels[1].verdict.text
    better = compare(base, seeds("O5", 2.295, 2.296, 2.298, dtype="bfloat16", loss_types=["bfloat16"])).levels[1]
    assert (better.finding.kind, better.finding.better) == ("within", False)
    # FP16 has finer steps, a logged metric is not a loss, and a few losses may be exact in BF16 without rounding.
    assert compare(base, seeds("O2", *finer, loss_types=["float16"])).levels[1].finding.kind == "differs"
    logged = [logs("O0", 0.5, 0.51), logs("O5", 0.6, 0.61)]
    assert compare(*logged, metric="accuracy").notes == []
    few = [made_up_run("O5", seed, steps=2, final=1.0, loss_types=["bfloat16"]) for seed in range(3)]
    assert measures.loss_type(few) is None


@pytest.mark.parametrize(
    ("loss", "types"),
    [
        (2.3125, ["bfloat16", "float16"]),
        (2.302734375, ["float16"]),
        (2.3, []),
        (1e-30, []),
        (2.0**-100, ["bfloat16"]),
        (2.0**17, ["bfloat16"]),
        (1e300, []),
        (float("nan"), ["bfloat16", "float16"]),
    ],
)
def test_a_recording_has_the_types_that_hold_its_losses_exactly(loss, types):
    model = torch.nn.Linear(1, 1).double()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.0), opt_level="O0", verbosity=0)
    with amp.record() as run, amp.scale_loss(loss + 0 * model.weight.sum(), optimizer) as scaled:
        scaled.backward()
    assert run.loss_types is None, "no step was made"
    with amp.record() as run:
        with amp.scale_loss(loss + 0 * model.weight.sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert run.loss_types == types
    amp.restore()


def test_min_gain_comes_from_the_command_line():
    parser = argparse.ArgumentParser()
    compare_arguments.add_arguments(parser)
    for given, share in (([], 0.05), (["--min-gain", "0.5"], 0.005)):
        args = parser.parse_args([*given, "train.py"])
        args.arguments = []
        plan = compare_arguments.plan_of(args)
        assert comparison_of(args, plan, [], 0, {}).min_gain == pytest.approx(share)
    for wrong in (-1.0, 100.0, float("nan"), True):
        with pytest.raises(ValueError, match=r"compare: min_gain is .*; wanted per cent"):
            Plan(min_gain=wrong)
    assert amp.compare(train, ["O4"], seeds=1, steps=1, min_gain=7, verbosity=0).min_gain == pytest.approx(0.07)

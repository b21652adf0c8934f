"""A table of situations, planted in recorded results, and what `compare` must say of each, from three seeds and one.

An answer is the headline, the finding of the last level, and words of the summary.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import pytest
from compared_runs import compare, logs, made_up_run, seeds

from amp_patch.comparison import headline, what_next
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.regression import answers
from amp_patch.diagnose.lost_updates import Updates
from amp_patch.diagnose.recording.run import LOW_TYPES, Run, dumps, loads

BASE = (2.0, 2.02, 1.98)
SAME = (2.0004, 2.0201, 1.9801)  # within the margin at the same seeds
FAST = {"ms": 5}
BF16 = {"dtype": "bfloat16"}
STAY, FOR_NOW = "Stay with O0", "Stay with O0 for now"


def off(percent: float) -> tuple[float, ...]:
    return tuple(
        base * (1 + each / 100) for base, each in zip(BASE, (percent, 1.1 * percent, 0.9 * percent), strict=True)
    )


def turned(runs: list[Run], **fields) -> list[Run]:
    """Negate the losses: they then rise from -4."""
    for run in runs:
        run.loss = [-loss for loss in run.loss]
        for name, value in fields.items():
            setattr(run, name, value)
    return runs


def curves(level: str, *losses: list[float], **fields) -> list[Run]:
    fields.setdefault("dtype", None if level == "O0" else "bfloat16")
    made = [made_up_run(level, seed, len(loss), loss=[*loss], **fields) for seed, loss in enumerate(losses)]
    for run in made:
        run.skipped = run.skipped if run.dtype == "float16" else [False] * run.steps
    return made


def falling(seed: int, steps: int = 60, behind: int = 0, by: float = 1.0) -> list[float]:
    """Return the losses of a short run, which still falls at its end: 4 % in each step."""
    late = [max(0, step - behind) for step in range(steps)]
    return [by * (4 + seed / 10) * math.exp(-0.04 * step) for step in late]


def exploding(seed: int) -> list[float]:
    """Return the losses of a search for the learning rate: they fall, and end far above the first."""
    return [4 - 0.05 * step + 1e-6 * math.exp(0.5 * (step + seed / 2)) for step in range(60)]


def stopped(at: int, **fields) -> list[Run]:
    """The level's runs end after `at` of 40 steps."""
    runs = seeds("O5", *SAME, **BF16, **FAST, **fields)
    for run in runs:
        run.loss, run.skipped = run.loss[:at], run.skipped[:at]
    return runs


def searching(percent: float) -> list[Run]:
    """FP16 that has skipped its first two steps, and is `percent` worse besides."""
    losses = [falling(seed, behind=2, by=1 + percent / 100) for seed in range(3)]
    made = curves("O2", *losses, dtype="float16", **FAST)
    for run in made:
        run.skipped = [step < 2 for step in range(run.steps)]
    return made


def rounded(percent: float, at_first: float) -> list[Run]:
    """A level that ends `percent` above O0, whose first losses lie `at_first` per cent apart already."""
    runs = seeds("O5", *off(percent), **BF16, **FAST)
    for run in runs:
        run.loss[:3] = [loss * (1 + at_first / 100) for loss in run.loss[:3]]
    return runs


def with_forwards(runs: list[Run], forwards: int, **fields) -> list[Run]:
    for run in runs:
        run.forwards = forwards
        for name, value in fields.items():
            setattr(run, name, value)
    return runs


def measured(runs: list[Run], changed: int) -> list[Run]:
    """In the sampled steps of the runs, so many elements of a weight have changed."""
    for run in runs:
        run.updates = [Updates(each, {"0.weight": [changed, 0]}, step) for each in LOW_TYPES for step in (1, 2)]
    return runs


class Situation(NamedTuple):
    """Attributes:
    groups: the runs of O0, then of other levels.
    sure, quick: the kind and reason of the last level's finding ("unjudged constant"), and the headline, from three
        seeds and from the first alone.
    says: words of the summary, from three seeds and from one.
    """

    name: str
    groups: tuple[list[Run], ...]
    sure: tuple[str, str]
    quick: tuple[str, str]
    says: str
    options: dict[str, object] = {}  # noqa: RUF012 (it is only read)


def same(name: str, groups: tuple[list[Run], ...], answer: tuple[str, str], says: str, **options) -> Situation:
    return Situation(name, groups, answer, answer, says, options)


O0 = seeds("O0", *BASE)
MAXIMIZED = {"maximized": "all"}
SITUATIONS = [
    # Direction.
    Situation(
        "the optimizer maximizes, and the level is 1.6 % worse",
        (turned(seeds("O0", *BASE), **MAXIMIZED), turned(seeds("O5", *off(1.6), **BF16, **FAST), **MAXIMIZED)),
        ("differs", STAY),
        ("undecided", FOR_NOW),
        "O5 BF16",
    ),
    Situation(
        "the optimizer maximizes, and the level is 1.6 % better",
        (turned(seeds("O0", *BASE), **MAXIMIZED), turned(seeds("O5", *off(-1.6), **BF16, **FAST), **MAXIMIZED)),
        ("differs", "Use O5"),
        ("undecided", "So far O5"),
        "O5 BF16",
    ),
    same(
        "the training makes the loss larger",
        (turned(seeds("O0", *BASE)), turned(seeds("O5", *off(1.6), **BF16, **FAST))),
        ("unjudged rises", FOR_NOW),
        "the baseline's training makes the loss larger; add --maximize if the training maximizes it",
    ),
    same(
        "some parameters maximize",
        (seeds("O0", *BASE, maximized="some"), seeds("O5", *SAME, **BF16, **FAST, maximized="some")),
        ("unjudged both ways", FOR_NOW),
        "some parameters maximize the loss, others minimize it",
    ),
    # Steps.
    same(
        "an error that the log shows",
        (O0, stopped(20, caught="RuntimeError: expected scalar type Float but found BFloat16")),
        ("differs", STAY),
        "do not use O5 BF16",
    ),
    same("an error in a step", (O0, stopped(39, unfinished=True)), ("differs", STAY), "do not use O5 BF16"),
    Situation(
        "an error without a trace",
        (O0, stopped(20)),
        ("differs", STAY),
        ("unjudged length", FOR_NOW),
        "O5 BF16",
    ),
    Situation(
        "early stopping",
        (curves("O0", falling(0, 60), falling(1, 57), falling(2, 59)),
         curves("O5", falling(0, 60), falling(1, 56), falling(2, 60), **FAST)),
        ("within", "Use O5"),
        ("within", "Use O5"),
        "Use O5 BF16",
    ),
    # Batches that made no step.
    same(
        "batches left out, with an error in the log",
        (with_forwards(seeds("O0", *BASE), 40),
         with_forwards(seeds("O5", *SAME, **BF16, **FAST), 60, caught="skipped: RuntimeError: BFloat16 and Float")),
        ("differs", STAY),
        "do not use O5 BF16",
    ),
    same(
        "batches left out, and fewer steps",
        (with_forwards(seeds("O0", *BASE), 80), with_forwards(stopped(30), 80)),
        ("differs", STAY),
        "do not use O5 BF16",
    ),
    same(
        "batches left out, and others in their place",
        (with_forwards(seeds("O0", *BASE), 40), with_forwards(seeds("O5", *off(-8), **BF16, **FAST), 60)),
        ("unjudged left out", FOR_NOW),
        "20 forwards more than O0's led to no step, as if batches were left out; look into its log",
    ),
    Situation(
        "four forwards a step, and one that is tried twice",
        (with_forwards(seeds("O0", *BASE), 160), with_forwards(seeds("O5", *SAME, **BF16, **FAST), 162)),
        ("within", "Use O5"),
        ("undecided", "So far O5"),
        "O5 BF16",
    ),
    # O0's own training.
    same(
        "a learning rate of 0",
        (measured(seeds("O0", *BASE), 0), seeds("O5", *SAME, **BF16, **FAST)),
        ("unjudged frozen", FOR_NOW),
        "the baseline's steps change no weight: nothing was trained; look at the learning rate",
    ),
    Situation(
        "a warm-up from 0",
        (measured(seeds("O0", *BASE), 3), seeds("O5", *SAME, **BF16, **FAST)),
        ("within", "Use O5"),
        ("undecided", "So far O5"),
        "O5 BF16",
    ),
    Situation(
        "one seed of O0 collapses",
        (seeds("O0", 2.0, 3.9, 2.001), seeds("O5", 2.0004, 2.003, 2.0014, **BF16, **FAST)),
        ("unjudged outlier", FOR_NOW),
        ("undecided", "So far O5"),
        "O5 BF16",
    ),
    Situation(
        "one seed collapses, at both",
        (seeds("O0", 2.0, 3.9, 2.001), seeds("O5", 2.0004, 3.9002, 2.0014, **BF16, **FAST)),
        ("within", "Use O5"),
        ("undecided", "So far O5"),
        "O5 BF16",
    ),
    same(
        "a loss that explodes at its end",
        (curves("O0", *map(exploding, range(3))), curves("O5", *map(exploding, (7, 5, 3)), **FAST)),
        ("unjudged rises", FOR_NOW),
        "the baseline's training makes the loss larger",
    ),
    same(
        "a seed from the time, or a checkpoint of another run",
        (seeds("O0", *BASE, start=[1.0, -0.5]), seeds("O5", *off(-20), **BF16, **FAST, start=[1.0, -0.4])),
        ("unjudged start", FOR_NOW),
        "with the same seed it began with other weights, or another batch, than the baseline; turn off what goes on",
    ),
    Situation(
        "first weights that are rounded",
        (seeds("O0", *BASE, start=[1.0, -0.5]), seeds("O5", *SAME, **BF16, **FAST, start=[1.003, -0.501])),
        ("within", "Use O5"),
        ("undecided", "So far O5"),
        "O5 BF16",
    ),
    same(
        "a figure of quality that is logged, and not asked for",
        tuple(seeds(level, *values, objectives=2, logged={"fid": [(40, 9.0)]})
              for level, values in (("O0", BASE), ("O2", SAME))),
        ("unjudged sum", FOR_NOW),
        "judge by a figure that the script logs: --metric fid",
    ),
    # Constant figures.
    same(
        "a loss of 0",
        (curves("O0", *[[0.0] * 40] * 3), curves("O5", *[[0.0] * 40] * 3, **FAST)),
        ("unjudged constant", FOR_NOW),
        "the baseline's is the same at every step: it measures nothing",
    ),
    same(
        "a loss that does not move, but for rounding",
        (curves("O0", *[[0.6931472, 0.6931471] * 20] * 3), curves("O5", *[[0.6934] * 40] * 3, **FAST)),
        ("unjudged constant", FOR_NOW),
        "the same at every step",
    ),
    same(
        "an accuracy that does not move",
        tuple([made_up_run(level, seed, logged={"accuracy": [(0, 0.5), (20, 0.5), (40, 0.5)]}) for seed in range(3)]
              for level in ("O0", "O2")),
        ("unjudged constant", FOR_NOW),
        "the same at every step",
        metric="accuracy",
        maximize=True,
    ),
    same(
        "FP64",
        (seeds("O0", *BASE, weights_type="float64"), seeds("O4", *BASE, **BF16, **FAST)),
        ("unjudged FP64", FOR_NOW),
        "the script's weights are FP64, which this level leaves as they are",
    ),
    # Noise and small steps.
    Situation(
        "more than ten seeds",
        (O0, seeds("O5", 2.005, 2.16, 1.99, **BF16)),
        ("undecided", FOR_NOW),
        ("undecided", FOR_NOW),
        "O5 BF16",
    ),
    same(
        "the search for a scale",
        (curves("O0", *map(falling, range(3))), searching(0)),
        ("unjudged scale", FOR_NOW),
        "2 of 60 steps were the search for a loss scale",
    ),
    Situation(
        "the search for a scale, and a level that is worse besides",
        (curves("O0", *map(falling, range(3))), searching(12)),
        ("differs", STAY),
        ("undecided", FOR_NOW),
        "O2 FP16",
    ),
    same(
        "a loss that the forward rounds",
        (O0, rounded(0.57, 0.6)),
        ("unjudged rounded", FOR_NOW),
        "from the same weights and batches, first losses lie up to 0.6",
    ),
    same(
        "a loss that the forward rounds to the better side",
        (O0, rounded(-0.57, -0.8)),
        ("unjudged rounded", FOR_NOW),
        "its forward rounds the loss",
    ),
    Situation("worse, from equal losses", (O0, rounded(0.57, 0.01)), ("differs", STAY), ("undecided", FOR_NOW), ""),
    Situation("worse from the first step", (O0, rounded(30, 30)), ("differs", STAY), ("undecided", FOR_NOW), ""),
]  # fmt: skip


def first_seed(made: Comparison) -> Comparison:
    return compare([run for run in made.runs if run.seed == 0], metric=made.metric, maximize=made.maximize)


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda each: each.name)
@pytest.mark.parametrize("again", [False, True], ids=["", "reread"])
def test_a_situation_gets_its_answer_from_three_seeds_and_from_one(situation, again):
    made = compare(*situation.groups, **situation.options)
    for each, (kind, card) in ((made, situation.sure), (first_seed(made), situation.quick)):
        told = Comparison.from_dict(loads(dumps(each.to_dict()))) if again else each
        found = told.levels[-1].finding
        assert f"{found.kind} {found.unjudged}".strip() == kind, told.levels[-1].verdict.text
        assert re.sub(r" \(.*\)", "", headline.headline(told)) == card
        assert situation.says in told.summary
        if found.kind == "unjudged":
            assert "as good" not in headline.in_short(told.levels[-1], told) and not found.usable
            assert what_next.advice(told)


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda each: each.name)
def test_no_level_is_praised_for_what_was_not_judged_so(situation):
    made = compare(*situation.groups, **situation.options)
    for each in (made, first_seed(made)):
        if each.levels[-1].finding.kind != "within":
            assert "BF16 would do as well" not in each.summary.replace("whether O5 BF16 would do as well", "")
        assert "more seeds" not in each.summary or each.seeds_to_tell is None or each.seeds_to_tell <= 10


def test_a_stopped_level_says_where_and_why_and_shortens_no_other():
    said = "RuntimeError: expected scalar type Float but found BFloat16"
    made = compare(O0, seeds("O4", *SAME, **BF16, **FAST), stopped(5, caught=said))
    text = made.levels[2].verdict.text
    assert text.startswith(f"do not use: made 5 of 40 steps with seeds 0, 1 and 2: {said}")
    assert headline.in_short(made.levels[2], made) == "do not use: stopped"
    assert not any("trained only" in note for note in made.notes), "the verdict says so"
    assert made.steps == 40 and made.levels[1].finding.kind == "within" and made.recommended is made.levels[1]
    quiet = compare(O0, stopped(5)).levels[1].verdict.text
    assert "made 5 of 40 steps with seeds 0, 1 and 2, by itself or after an error that the script catches" in quiet
    # A metric that the script logs all the same does not save the level.
    base, level = logs("O0", 0.9, 0.91, 0.92), logs("O2", 0.9, 0.91, 0.92)
    for run in level:
        run.loss = run.loss[:20]
    made = compare(base, level, metric="accuracy", maximize=True)
    assert made.levels[1].finding.rejected and "made 20 of 40 steps" in made.levels[1].verdict.text


def test_a_diverged_run_that_gave_up_has_diverged():
    level = stopped(20)
    for run in level:
        run.loss[-1] = math.nan
    assert "diverged with seeds 0, 1 and 2 at step 19" in compare(O0, level).levels[1].verdict.text


@pytest.mark.parametrize("count", [3, 8, 12])
def test_no_advice_asks_for_more_than_ten_seeds(count):
    base = [2.0 + seed / 100 for seed in range(count)]
    for spread in (0.001, 0.004, 0.01, 0.05):
        level = [each * (1 + 0.003 + spread * (-1) ** seed) for seed, each in enumerate(base)]
        made = compare(seeds("O0", *base), seeds("O5", *level, **BF16), folder="out", again="train.py")
        gap = made.levels[1].finding.gap
        assert gap.more_seeds is None or count + gap.more_seeds <= 10
        assert made.seeds_to_tell is None or made.seeds_to_tell <= 10
        if gap.is_noisy and made.levels[1].finding.kind == "undecided":
            assert "it cannot be told with results this noisy: take more steps, or a metric" in made.summary
            assert "noisy" in what_next.advice(made) and "noisy" in made.levels[1].verdict.text


def test_levels_that_are_as_good_so_far_or_no_worse_are_not_called_as_good():
    so_far = compare(O0, seeds("O5", 2.006, 2.021, 1.982, **BF16))
    assert so_far.levels[1].finding.kind == "so far" and "O5 BF16 may do as well, but not faster" in so_far.summary
    no_worse = compare(seeds("O0", 2.30, 2.29, 2.31), seeds("O5", 2.25, 2.29, 2.22, **BF16))
    assert no_worse.levels[1].finding.kind == "no worse" and "O5 BF16 did no worse, but not faster" in no_worse.summary


# --- the same, trained in this process ---


# --- the baseline of a gate ---


def test_a_gate_names_levels_that_are_not_judged():
    flat = compare(curves("O0", *[[0.0] * 40] * 3), curves("O5", *[[0.0] * 40] * 3))
    told = answers(flat, flat, "report.json")
    assert not told.as_good and not told.worse and "the same at every step" in told.missing[0].what
    before = compare(turned(seeds("O0", *BASE)), turned(seeds("O5", *SAME, **BF16)))
    now = compare(turned(seeds("O0", *BASE)), turned(seeds("O5", *off(5), **BF16)))
    told = answers(before, now, "report.json")
    assert [each.level for each in told.missing] == ["O5"] and not told.as_good and not told.worse
    fp64 = compare(seeds("O0", *BASE, weights_type="float64"), seeds("O4", *BASE, **BF16))
    assert answers(fp64, fp64, "report.json").as_good == ["O4"], "it does what it did, to the bit"
    worse = answers(compare(O0, seeds("O5", *SAME, **BF16)), compare(O0, stopped(20)), "report.json").worse
    assert [each.level for each in worse] == ["O5", "O5", "O5"]

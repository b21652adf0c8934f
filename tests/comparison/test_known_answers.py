"""Comparisons with a known right answer, from three seeds and from one: the headline, its reason, the next step."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
from compared_runs import compare, logs, seeds

from amp_patch.comparison import headline, page, what_next
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.module_search import trial_of
from amp_patch.diagnose.lost_updates import Updates
from amp_patch.diagnose.recording.run import Run

NAN = float("nan")
BASE = (2.0, 2.02, 1.98)  # O0's final losses, from 4.0 on
SAME = (2.0004, 2.0201, 1.9801)  # within the margin of 0.2 %, at the same seeds
BF16 = {"dtype": "bfloat16"}
SMALL = {"peak_memory": int(0.7 * 2**20)}
LARGE = {"peak_memory": int(1.45 * 2**20)}
FAST = {"ms": 5}
SLOW = {"ms": 20}


def off(*by: float) -> tuple[float, ...]:
    """Return final losses that are these percentages above O0's."""
    return tuple(base * (1 + each / 100) for base, each in zip(BASE, by, strict=True))


def lost(share: int) -> dict[str, list[Updates]]:
    return {"updates": [Updates("bfloat16", {"weight": [100, share]})]}


def unsteady(runs: list[Run]) -> list[Run]:
    """Faster with one seed and slower with another."""
    for run, ms in zip(runs, (6, 15, 9), strict=True):
        run.seconds = [ms / 1000] * 40
    return runs


def skipped(runs: list[Run]) -> list[Run]:
    for run in runs:
        run.skipped = [step < 25 for step in range(run.steps)]
    return runs


def logged(level: str, *values: float, **fields) -> list[Run]:
    runs = logs(level, *values)
    for run in runs:
        for name, value in fields.items():
            setattr(run, name, value)
    return runs


class Case(NamedTuple):
    """Runs of three seeds with the right answers for all of them (`sure`) and for the first alone (`quick`).

    An answer is the headline, and the standing of the level that it names or else of the first level after O0."""

    name: str
    groups: tuple[list[Run], ...]
    sure: tuple[str, str]
    quick: tuple[str, str]
    options: dict[str, object] = {}  # noqa: RUF012 (it is only read)


LOSES = {"weights_type": "bfloat16"}
BETTER = off(-12, -12.1, -11.9)
STAY, FOR_NOW = "Stay with O0", "Stay with O0 for now"


def of_o0(*groups: list[Run], **fields) -> tuple[list[Run], ...]:
    return (seeds("O0", *BASE, **fields), *groups)


CASES = [
    # A script that comes in BF16: its updates are lost, and masters are better whatever they cost.
    Case(
        "lost updates, slower",
        of_o0(seeds("O5", *BETTER, **BF16, **LARGE, **SLOW, **lost(81)), **LOSES),
        ("Use O5", "better"),
        ("So far O5", "better"),
    ),
    Case(
        "lost updates, faster",
        of_o0(seeds("O5", *BETTER, **BF16, **LARGE, **FAST, **lost(81)), **LOSES),
        ("Use O5", "better"),
        ("So far O5", "faster"),
    ),
    Case(
        "lost updates, the speed is not clear",
        of_o0(unsteady(seeds("O5", *BETTER, **BF16, **LARGE, **lost(81))), **LOSES),
        ("Use O5", "better"),
        ("So far O5", "faster"),
    ),
    Case(
        "lost updates, a rung is as good and smaller",
        of_o0(
            seeds("O5", *BETTER, **BF16, **LARGE, **lost(81)),
            seeds("O5+split", *BETTER, **BF16, peak_memory=int(1.2 * 2**20)),
            **LOSES,
        ),
        ("Use O5+split", "better"),
        ("So far O5+split", "better"),
    ),
    Case(
        "BF16 that loses few updates",
        of_o0(seeds("O5", *SAME, **BF16, **LARGE, **lost(5)), **LOSES),
        (STAY, "no gain"),
        (FOR_NOW, "undecided"),
    ),
    Case(
        "BF16 that loses few updates, by torch's slow kernels",
        of_o0(seeds("O5", *SAME, **BF16, **LARGE, **FAST, **lost(5)), **LOSES),
        ("Use O5", "faster"),
        ("So far O5", "faster"),
    ),
    # FP16.
    Case(
        "an eps that is 0 in FP16",
        of_o0(seeds("O3", *BASE, **FAST, loss=[NAN] * 40, lost_eps=1e-8)),
        (STAY, "differs"),
        (STAY, "differs"),
    ),
    Case(
        "an eps that is 0 in FP16, and a level with masters",
        of_o0(seeds("O3", *BASE, loss=[NAN] * 40, lost_eps=1e-8), seeds("O2", *SAME, **FAST)),
        ("Use O2", "faster"),
        ("So far O2", "faster"),
    ),
    Case("skips", of_o0(skipped(seeds("O2", *SAME, **FAST))), (STAY, "skips"), (FOR_NOW, "undecided")),
    # A level that is wrong.
    Case("all collapse", of_o0(seeds("O2", 50.0, 51.0, 52.0, **FAST)), (STAY, "differs"), (STAY, "differs")),
    Case("one collapses", of_o0(seeds("O2", 50.0, 2.02, 1.98, **FAST)), (STAY, "differs"), (STAY, "differs")),
    Case("worse", of_o0(seeds("O5", *off(1, 1.1, 0.9), **BF16, **FAST)), (STAY, "differs"), (FOR_NOW, "undecided")),
    Case(
        "one of three failed",
        of_o0([*seeds("O5", *SAME[:2], **BF16, **FAST), Run("O5", 2, dtype="bfloat16", error="boom")]),
        (STAY, "failed with some"),
        ("So far O5", "faster"),
    ),
    # A level that is better, smaller or faster.
    Case("better", of_o0(seeds("O5", *off(-1, -1.1, -0.9), **BF16)), ("Use O5", "better"), ("So far O5", "better")),
    Case(
        "better, and one that is faster",
        of_o0(seeds("O4", *SAME, **BF16, **FAST), seeds("O5", *off(-1, -1.1, -0.9), **BF16)),
        ("Use O5", "better"),
        ("So far O4", "faster"),  # with one seed, chance may make a level better
    ),
    Case("smaller", of_o0(seeds("O5", *SAME, **BF16, **SMALL)), ("Use O5", "smaller"), ("So far O5", "smaller")),
    Case("faster", of_o0(seeds("O4", *SAME, **BF16, **FAST)), ("Use O4", "faster"), ("So far O4", "faster")),
    Case(
        "a little faster",
        of_o0(seeds("O4", *SAME, **BF16, ms=9.8)),
        ("Use O4", "a little faster"),
        ("So far O4", "a little faster"),
    ),
    Case(
        "smaller, and slower",
        of_o0(seeds("O5", *SAME, **BF16, **SMALL, **SLOW)),
        (STAY, "slower"),
        (FOR_NOW, "undecided"),
    ),
    Case(
        "smaller, and the speed is not clear",
        of_o0(unsteady(seeds("O5", *SAME, **BF16, **SMALL))),
        (STAY, "not clear"),
        ("So far O5", "faster"),
    ),
    Case("neither", of_o0(seeds("O4", *SAME, **BF16)), (STAY, "no gain"), (FOR_NOW, "undecided")),
    Case("the same bits", of_o0(seeds("O5", *BASE, **BF16, **SMALL)), ("Use O5", "smaller"), ("Use O5", "smaller")),
    Case(
        "O3 among others",
        of_o0(seeds("O3", *SAME, **FAST), seeds("O2", *SAME, **SMALL)),
        ("Use O2", "smaller"),
        ("So far O2", "smaller"),
    ),
    # Differences that the seeds do not decide.
    Case(
        "noise as large as the seeds'",
        of_o0(seeds("O5", *off(0.15, 2.5, -2.4), **BF16, **FAST)),
        ("Use O5", "faster"),
        ("So far O5", "faster"),
    ),
    Case(
        "worse by chance or not",
        of_o0(seeds("O5", *off(3, 0.1, 2), **BF16, **FAST)),
        (FOR_NOW, "undecided"),
        (FOR_NOW, "undecided"),
    ),
    Case(
        "a GAN",
        of_o0(seeds("O5", *SAME, **BF16, **FAST, objectives=2), objectives=2),
        (FOR_NOW, "unjudged"),
        (FOR_NOW, "unjudged"),
    ),
    Case(
        "a better accuracy",
        (logs("O0", 0.80, 0.81, 0.79), logged("O5", 0.85, 0.86, 0.84, **BF16)),
        ("Use O5", "better"),
        ("So far O5", "better"),
        {"metric": "accuracy", "maximize": True},
    ),
]
SOUND = {
    "better",
    "faster",
    "smaller",
    "a little faster",
    "slower",
    "not clear",
    "not timed",
    "no gain",
    "no FP32 weights",
}


def check(made: Comparison, expected: tuple[str, str]) -> None:
    """Headline, summary, card, rows and search say the same, for the same reason."""
    title, reason = expected
    advice = made.recommendation
    said = re.sub(r" \([^)]*\)", "", headline.headline(made))
    assert (said, advice.so_far) == (title, title.startswith("So far"))
    verb, name = (title.removesuffix(" for now").rpartition(" ")[i] for i in (0, 2))
    assert made.summary.startswith(f"{verb} {name}") and advice.level.level == name
    assert f"<h1>{headline.headline(made)}</h1>" in page.html(made)
    if name == "O0":
        assert reason in advice.because and headline.gains(made) == ""
    else:
        assert [*advice.because] == [reason]
        word, colour = ("so far", "unsure") if advice.so_far else ("use this", "best")
        assert (headline.outcome(advice.level, made), headline.state(advice.level, made)) == (word, colour)
        first = {"better": ("better", "loss -", "accuracy +"), "smaller": ("less memory",)}.get(reason, ("faster",))
        assert any(each in headline.gains(made).split(", ")[0].lower() for each in first), "its reason comes first"
        assert bool(what_next.to_be_sure(made)) is advice.so_far
    for level in made.levels:
        if level is not made.baseline:
            alone = compare(made.baseline.all_runs, level.all_runs, metric=made.metric, maximize=made.maximize)
            assert trial_of((), alone).passes is (advice.standing(level) in SOUND), "as `search` has it"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_known_case_gets_the_right_answer_from_three_seeds_and_from_one(case):
    assert len(CASES) >= 25
    check(compare(*case.groups, again="train.py", **case.options), case.sure)
    first = [[run for run in runs if run.seed == 0] for runs in case.groups]
    check(compare(*first, again="train.py", **case.options), case.quick)

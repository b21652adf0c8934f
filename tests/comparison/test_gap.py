"""The gap at the same seeds: its interval, the verdict by a margin, how many more seeds, and time to equal loss."""

from __future__ import annotations

import argparse
import math
import random
import re
import statistics

import pytest
from compared_runs import compare, judge, made_up_run, seeds

from amp_patch.comparison import headline, measures, page, table
from amp_patch.comparison.commands import compare_arguments
from amp_patch.comparison.commands.report import comparison_of
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.gap import Gap, gap
from amp_patch.comparison.plan import Plan
from amp_patch.diagnose.recording.run import dumps, loads

BASE = (2.0, 2.02, 1.98)


def off(*percents: float, of: tuple[float, ...] = BASE) -> list[float]:
    """Return results that differ from the baseline's by these percentages of 2."""
    return [base + each / 50 for base, each in zip(of, percents, strict=True)]


def found(*percents: float, **options) -> Gap:
    level = compare(seeds("O0", *BASE), seeds("O5", *off(*percents), dtype="bfloat16"), **options).levels[1]
    assert level.finding.gap is not None
    return level.finding.gap


def test_a_gap_has_the_interval_of_a_paired_t_test():
    """Differences 1, 2, 3: mean 2, deviation 1, half of the interval 4.303 / sqrt(3)."""
    made = gap([11, 12, 13], [10, 10, 10], sign=1, margin=0.5, gained=0, has_spread=True)
    half = 4.302653 / math.sqrt(3)
    assert (made.level, made.base, made.mean, made.seeds) == (12, 10, 2, 3)
    assert made.low == pytest.approx(2 - half) and made.high == pytest.approx(2 + half)
    assert (made.margin, made.worse_from, made.told) == (5, 5, "as good") and made.share(made.mean) == 0.2
    turned = gap([11, 12, 13], [10, 10, 10], sign=-1, margin=0.5, gained=0, has_spread=True)
    assert (turned.mean, turned.low, turned.high) == (made.mean, made.low, made.high), "the metric's own sign stays"
    huge = gap([1e308, 0.8e308], [0.9e308, 0.9e308], sign=1, margin=0.5, gained=0, has_spread=True)
    assert huge.low is not None and math.isfinite(huge.margin)


def test_95_percent_of_the_intervals_contain_the_true_gap():
    """Gaps of 0.3 with normal noise: 95 % of 4000 intervals have it inside, and both sides miss alike."""
    draws, missed = random.Random(0), [0, 0]
    for _ in range(4000):
        theirs = [draws.gauss(2, 1) for _ in range(3)]
        ours = [each + 0.3 + draws.gauss(0, 0.2) for each in theirs]
        made = gap(ours, theirs, sign=1, margin=0.002, gained=0, has_spread=True)
        missed[0] += made.low > 0.3
        missed[1] += made.high < 0.3
    assert all(0.02 < each / 4000 < 0.03 for each in missed)


@pytest.mark.parametrize(
    ("percents", "told", "kind"),
    [
        ((0.05, 0.06, 0.04), "as good", "within"),
        ((-0.5, -0.51, -0.52), "better", "differs"),
        ((-0.1, -0.11, -0.12), "as good", "within"),
        ((0.6, 0.61, 0.59), "worse", "differs"),
        ((0.2, 0.21, 0.19), None, "undecided"),  # surely worse, but not surely by more than the margin
        ((0.2, 0.3, -0.2), None, "so far"),
    ],
)
def test_a_level_is_judged_by_its_interval_and_the_margin(percents, told, kind):
    made = compare(seeds("O0", *BASE), seeds("O5", *off(*percents), dtype="bfloat16", ms=5))
    level = made.levels[1]
    assert (level.finding.gap.told, level.finding.kind) == (told, kind)
    assert level.finding.usable is (kind in ("within", "so far") or told == "better")
    # If more of the metric is better, all signs are reversed.
    start = [made_up_run("O0", seed, logged={"accuracy": [(0, 1.9), (40, v)]}) for seed, v in enumerate(BASE)]
    values = off(*(-each for each in percents))
    ours = [made_up_run("O5", seed, logged={"accuracy": [(0, 1.9), (40, v)]}) for seed, v in enumerate(values)]
    turned = compare(start, ours, metric="accuracy", maximize=True).levels[1]
    assert (turned.finding.gap.told, turned.finding.kind) == (told, kind)


def test_a_given_margin_decides_the_verdict():
    percents = (0.6, 0.61, 0.59)
    assert [found(*percents, margin=each).told for each in (0.002, 0.01)] == ["worse", "as good"]
    made = compare(seeds("O0", *BASE), seeds("O5", *off(*percents), dtype="bfloat16"), margin=0.01)
    again = Comparison.from_dict(loads(dumps(made.to_dict())))
    assert again.margin == 0.01 and again.levels[1].finding == made.levels[1].finding
    old = {name: value for name, value in made.to_dict().items() if name != "margin"}
    assert Comparison.from_dict(old).margin == 0.002
    parser = argparse.ArgumentParser()
    compare_arguments.add_arguments(parser)
    for given, share in (([], 0.002), (["--margin", "1"], 0.01)):
        args = parser.parse_args([*given, "train.py"])
        args.arguments = []
        plan = compare_arguments.plan_of(args)
        assert comparison_of(args, plan, [], 0, {}).margin == pytest.approx(share)
    for wrong in (0, -1.0, 100.0, float("nan"), True):
        with pytest.raises(ValueError, match=r"compare: margin is .*; wanted per cent of O0's result"):
            Plan(margin=wrong)


def test_a_gap_says_how_many_more_seeds_would_decide():
    undecided = found(0.12, 0.18, 0.0)
    spread = statistics.stdev([0.12, 0.18, 0.0])

    def half(n: int) -> float:
        return measures.student_quantile(0.95, n - 1) * spread / math.sqrt(n)

    more, distance = undecided.more_seeds, 0.2 - 0.1
    assert more is not None and half(3 + more) < distance <= half(3 + more - 1)
    assert found(0.05, 0.06, 0.04).more_seeds is None, "told"
    assert found(0.2, 0.3, 0.0999).is_noisy, "about the margin: ten would not tell"
    assert found(0.2, 0.3, -0.2).is_noisy and not undecided.is_noisy
    text = judge(seeds("O0", *BASE), seeds("O5", *off(0.12, 0.18, 0.0))).text
    assert f"as good or not (margin 0.2 %) cannot be told yet; {more} more seeds would tell" in text
    worse = compare(seeds("O0", *BASE), seeds("O5", *off(0.2, 0.21, 0.19), dtype="bfloat16"))
    assert "worse, by how much (margin 0.2 %) cannot be told yet" in worse.levels[1].verdict.text
    near = compare(seeds("O0", *BASE), seeds("O5", *off(0.3, 0.4, 0.2), dtype="bfloat16"))
    more = near.levels[1].finding.gap.more_seeds
    assert near.summary == f"Stay with O0 for now: O5 BF16 cannot be judged yet, run {more} more seeds."


def test_the_range_of_seeds_decides_if_runs_decorrelate():
    made = compare(seeds("O0", *BASE), seeds("O5", 2.02, 1.98, 1.99, ms=5, dtype="bfloat16"))
    level = made.levels[1]
    assert level.finding.gap.decorrelated and level.finding.by_range and level.finding.kind == "within"
    assert level.verdict.text.endswith(
        "within the spread of O0's 3 seeds (1.980 to 2.020); gap to O0 -0.0033 (-0.17 %, 95 %: -4.2 to +3.8 %): "
        "the runs have decorrelated, it tells no more than the spread"
    )
    assert "it tells no more than the spread" in headline.how_sure(made)
    assert "the runs have decorrelated" in page.html(made)
    assert not found(0.2, 0.3, -0.2).decorrelated
    # A spread within the margin decides all the same.
    close = compare(seeds("O0", 2.0, 2.0002, 2.0004), seeds("O5", 2.0004, 2.0002, 2.0))
    assert close.levels[1].finding.gap.decorrelated and not close.levels[1].finding.by_range


def test_a_gap_that_is_small_against_the_improvement_is_not_worse():
    """The loss falls from 4 to 0.036: a gap of 2 % is 0.02 % of that fall, and a tenth of the spread of the seeds."""
    base = (0.036, 0.029, 0.043)
    apart = [each + 0.00072 for each in base]
    level = compare(seeds("O0", *base), seeds("O5", *apart, ms=5)).levels[1]
    assert level.finding.gap.is_slight and (level.finding.kind, level.finding.by_range) == ("within", True)
    assert "more than the margin 0.2 %, and little of what the training gained" in level.verdict.text
    # Three times the loss of seeds that agree is outside their range.
    base = (0.00101, 0.00100, 0.00102)
    level = compare(seeds("O0", *base), seeds("O5", *(3 * each for each in base), ms=5)).levels[1]
    assert (level.finding.kind, level.finding.better) == ("differs", False)
    # A metric without a curve has no known improvement.
    ours, theirs = ([(40, each)] for each in (0.9, 0.901)), ([(40, each)] for each in (0.5, 0.501))
    runs = [
        [made_up_run(name, seed, logged={"error": each}) for seed, each in enumerate(values)]
        for name, values in (("O0", theirs), ("O5", ours))
    ]
    assert compare(*runs, metric="error").levels[1].finding.gap.worse_from == pytest.approx(0.001001)


def test_a_gap_of_one_seed_has_no_interval():
    made = compare(seeds("O0", 2.0), seeds("O5", 2.001, ms=5))
    level = made.levels[1]
    assert (level.finding.gap.low, level.finding.gap.told, level.finding.kind) == (None, None, "undecided")
    assert "one seed, so without an interval" in level.verdict.text
    assert headline.how_sure(made).startswith("From one seed, so without an interval: run")
    assert "O5 FP16       2.001  +0.05 %  2.00x    1.00  so far" in table.lines(made)
    # One pair of several seeds has none either.
    lone = compare(seeds("O0", *BASE), seeds("O5", 2.001)).levels[1]
    assert (lone.finding.gap.low, lone.finding.kind) == (None, "so far")
    same = compare(seeds("O0", 2.0, 2.0), seeds("O5", 2.1, 2.2)).levels[1]
    assert same.finding.gap.low is None, "the script does not use its seeds"


def test_verdict_table_page_and_json_show_the_gap():
    made = compare(seeds("O0", *BASE), seeds("O5", *off(0.05, 0.06, 0.04), dtype="bfloat16", ms=5))
    phrase = "gap to O0 +0.001 (+0.05 %, 95 %: +0.025 to +0.075 %): as good (margin 0.2 %)"
    assert phrase in made.levels[1].verdict.text
    assert ["O5", "BF16", "2.001", "+0.05", "%"] in [line.split()[:5] for line in table.lines(made)]
    shown = page.html(made)
    assert "gap to O0, same seeds" in shown and "<td>+0.05 %<small>95 %: +0.025 to +0.075 %</small>" in shown
    assert headline.gains(made) == "2.0x faster, same memory, same loss within 0.2 % over 3 seeds"
    assert f"G{phrase[1:]}. O0's own seeds lie " in headline.how_sure(made)
    told = loads(dumps(made.to_dict()))["levels"][1]["gap"]
    assert told["told"] == "as good" and told["mean"] == pytest.approx(0.001) and told["seeds"] == 3
    assert told["high_percent"] == pytest.approx(0.0748, abs=1e-4) and told["margin_percent"] == pytest.approx(0.2)
    unsure = compare(seeds("O0", *BASE), seeds("O5", *off(0.12, 0.21, 0.0), dtype="bfloat16", ms=5))
    assert headline.gains(unsure) == "2.0x faster, same memory, same loss so far over 3 seeds"
    assert re.search("cannot be told yet; [0-9]+ more seeds would tell", headline.how_sure(unsure))

"""Verdicts of a comparison: the figures, the test, and the words."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from compared_runs import compare, judge, logs, made_up_run, seeds

from amp_patch.comparison import measures
from amp_patch.comparison.measures import Ratio
from amp_patch.diagnose.recording.run import Run

# Two-sided critical values of Student's t, from the printed tables: freedom, p, t.
TABLE = [
    *((1, 0.05, 12.706), (2, 0.05, 4.303), (3, 0.05, 3.182), (4, 0.05, 2.776), (5, 0.05, 2.571)),
    *((9, 0.05, 2.262), (10, 0.05, 2.228), (30, 0.05, 2.042), (1, 0.01, 63.657), (2, 0.01, 9.925)),
    *((4, 0.01, 4.604), (7, 0.01, 3.499), (8, 0.10, 1.860), (1, 0.5, 1.000), (120, 0.05, 1.980)),
]


@pytest.mark.parametrize("freedom, p, t", TABLE)
def test_the_distribution_of_student_agrees_with_tables(freedom, p, t):
    half = 0.0005  # the table's last digit
    assert 1 - measures.student(t + half, freedom) <= p <= 1 - measures.student(t - half, freedom)
    assert measures.student(0.0, freedom) == 0
    assert measures.student(math.inf, freedom) == pytest.approx(1)


def test_the_result_of_a_run_is_the_mean_of_its_last_tenth():
    run = Run("O0", loss=[100.0] * 36 + [1.0, 2.0, 3.0, 6.0])
    assert measures.final(run, "loss", 40) == 3.0
    assert measures.final(run, "loss", 30) == 100.0
    assert measures.final(Run("O0", loss=[5.0, 7.0]), "loss", 2) == 7.0
    assert measures.final(Run("O0", loss=[1e308] * 20), "loss", 20) == 1e308
    for bad in (math.nan, math.inf, -math.inf):
        assert math.isnan(measures.final(Run("O0", loss=[1.0] * 19 + [bad]), "loss", 20))
        assert measures.final(Run("O0", loss=[bad] * 18 + [1.0, 2.0]), "loss", 20) == 1.5
    assert math.isnan(measures.final(Run("O0"), "loss", 0))


def test_the_result_of_a_logged_metric_is_its_last_value():
    run = Run("O0", loss=[1.0], logged={"accuracy": [(1, 0.5), (2, 0.75)], "bad": [(1, 1.0), (2, math.nan)]})
    assert measures.final(run, "accuracy", 1) == 0.75
    assert math.isnan(measures.final(run, "bad", 1)) and math.isnan(measures.final(run, "missing", 1))


def test_a_mean_within_the_spread_of_seeds_is_as_good():
    seen = judge(seeds("O0", 1.0, 1.25, 1.5), seeds("O2", 1.25, 1.0, 1.5, ms=5))
    assert seen.kind == "within" and seen.usable and not seen.better
    assert seen.text == (
        "2.0x faster, same memory; "
        "final loss 1.250 within the spread of O0's 3 seeds (1.000 to 1.500); gap to O0 0 (0 %, 95 %: -50 to +50 %): "
        "the runs have decorrelated, it tells no more than the spread"
    )
    # The bounds belong to the spread.
    assert judge(seeds("O0", 1.0, 1.5), seeds("O2", 1.5, 1.5)).kind == "within"
    assert judge(seeds("O0", 1.0, 1.5), seeds("O2", 1.0, 1.0)).kind == "within"


def test_a_worse_level_is_not_to_be_used():
    seen = judge(seeds("O0", 1.0, 1.25, 1.5), seeds("O2", 2.0, 2.25, 2.5625, ms=5))
    assert seen.kind == "differs" and not seen.better and not seen.usable
    # Differences 1, 1, 1.0625: mean 49/48; Student's quantile on 2 degrees of freedom is 4.303.
    assert seen.text == (
        "do not use: final loss 2.271, gap to O0 +1 (+82 %, 95 %: +74 to +89 %): worse (margin 0.2 %); 2.0x "
        "faster, same memory"
    )


def test_a_better_level_is_usable():
    made = compare(seeds("O0", 1.0, 1.25, 1.5), seeds("O2", 0.5, 0.75, 1.0625, ms=5))
    seen = made.levels[1].verdict
    assert seen.kind == "differs" and seen.better and seen.usable
    assert (
        "gap to O0 -0.48 (-38 %, 95 %: -46 to -31 %): better (margin 0.2 %)" in seen.text
        and "do not use" not in seen.text
    )
    assert made.summary == "Use O2 FP16: 38 % better loss over 3 seeds, 2.0x faster, same memory."
    # More is worse unless asked to maximize.
    turned = replace(made, maximize=True)
    assert turned.levels[1].finding.unjudged == "direction", "the baseline's loss falls"


def test_a_level_is_undecided_if_the_test_does_not_reject_chance():
    base = seeds("O0", 1.0, 1.25, 1.5)
    seen = judge(base, seeds("O2", 1.0, 1.25, 3.0))  # mean 1.75; differences 0, 0, 1.5: t = 1
    assert seen.kind == "undecided" and not seen.better and not seen.usable
    assert "40 % above O0's 1.250" in seen.text and seen.text.endswith(
        "which may be chance; gap to O0 +0.5 (+40 %, 95 %: -132 to +212 %): the runs have "
        "decorrelated, it tells no more than the spread; it cannot be told with results this noisy: take more steps, "
        "or a metric"
    )
    seen = judge(base, seeds("O2", 1.0, 1.25, 0.0))  # the same, below
    assert (seen.kind, seen.better, seen.usable) == ("no worse", False, True) and "more seeds" not in seen.text


def test_the_t_test_decides_at_five_percent():
    base = seeds("O0", 0.0, 0.0, 5.0)
    # On 2 degrees of freedom 4.303 is the bound. Differences d, d, d + e have t = (3 d + e) / e.
    close = judge(base, seeds("O2", 3.29, 3.29, 5.0 + 3.29 + 3.0))  # t = 4.29
    clear = judge(base, seeds("O2", 3.32, 3.32, 5.0 + 3.32 + 3.0))  # t = 4.32
    assert (close.kind, clear.kind) == ("undecided", "differs")


def test_a_level_with_a_diverged_seed_is_not_to_be_used():
    broken = [1.0] * 30 + [math.nan] * 10
    level = seeds("O2", 1.0, 1.0, 1.0, ms=5)
    level[1].loss, level[2].loss = broken, broken[:33]  # the last one's script gave up
    made = compare(seeds("O0", 1.0, 1.25, 1.5), level)
    seen = made.levels[1].verdict
    assert seen.kind == "differs" and not seen.usable
    assert seen.text.startswith("do not use: diverged with seeds 1 and 2 at step 30; 2.0x faster")
    assert made.steps == 40, "a diverged run does not shorten the comparison"
    assert made.levels[1].finite == {0: 1.0} and [*map(math.isnan, made.levels[1].final)] == [False, True, True]
    assert made.summary == "Stay with O0: do not use O2 FP16."


def test_a_run_that_diverged_after_the_common_steps_has_diverged():
    level = seeds("O2", 1.0, 1.25)
    level[0].loss = [*level[0].loss, 1.0, math.nan]
    assert judge(seeds("O0", 1.0, 1.5), level).text.startswith("do not use: diverged with seed 0 at step 41")


def test_a_loss_that_came_back_has_not_diverged():
    level = seeds("O2", 1.0, 1.25)
    level[0].loss[3] = math.inf
    assert judge(seeds("O0", 1.0, 1.5), level).kind == "so far"


def test_a_verdict_says_if_the_baseline_diverged_too():
    base, level = seeds("O0", 1.0, 1.25, 1.5), seeds("O2", 1.0, 1.25, 1.5)
    base[1].loss = level[1].loss = [math.nan] * 40
    made = compare(base, level)
    assert made.baseline.verdict[:2] == (
        "baseline",
        "final loss 1.250 over 2 seeds (1.000 to 1.500); diverged with seed 1 at step 0",
    )
    assert "diverged with seed 1 at step 0, as O0 did" in made.levels[1].verdict.text


def test_losses_equal_to_the_bit_are_as_good():
    base, level = seeds("O0", 1.0), seeds("O2", 1.0, ms=5)
    assert judge(base, level).kind == "within" and "every loss the same as O0's, to the bit" in judge(base, level).text
    level[0].loss[0] = math.nextafter(4.0, 5.0)  # the figure is the same, the curve is not
    assert judge(base, level).kind == "undecided" and "equal to O0's" in judge(base, level).text
    # Without a loss, or without a finite one, there are no bits to compare.
    for losses in ([], [math.nan] * 40):
        base, level = logs("O0", 0.5), logs("O2", 0.5)
        base[0].loss = level[0].loss = losses
        assert judge(base, level, metric="accuracy", maximize=True).kind == "undecided"
    # Equal accuracies do not prove equal trainings.
    for values, kind in (((0.5,), "undecided"), ((0.5, 0.5), "within")):
        base, level = logs("O0", *values), logs("O2", *values)
        for run in level:
            run.loss = [*run.loss[:-1], 7.0]
        for run in base:
            run.loss = [*run.loss[:-1], float(run.seed)]
        assert judge(base, level, metric="accuracy", maximize=True).kind == kind


def test_seeds_that_change_nothing_count_as_one():
    made = compare(seeds("O0", 1.0, 1.0, 1.0), seeds("O2", 1.25, 1.25, 1.25))
    assert made.levels[1].verdict.kind == "undecided"
    assert "the seeds change nothing: final loss 25 % above O0's" in made.levels[1].verdict.text
    assert made.notes == ["all seeds of O0 gave the same losses to the bit: they are one seed to the test"]


def test_runs_are_paired_by_seed():
    base, level = seeds("O0", 1.0, 2.0, 4.0, 5.0), seeds("O2", 1.0, 2.0, 4.0, 5.0)
    for run, ms in zip(base, (10, 20, 40, 80), strict=True):
        run.seconds = [ms / 1000] * 40
    for run, ms in zip(level, (5, 5, 5, 5), strict=True):
        run.seconds = [ms / 1000] * 40
    made = compare(base[::-1], [level[3], level[1]])  # in any order, and not all of them
    assert made.levels[1].seeds == [1, 3] and made.levels[1].final == [2.0, 5.0]
    assert made.levels[1].speedup == Ratio(10.0, 4.0, 16.0)
    unpaired = compare(base[:2], level[2:]).levels[1]
    assert unpaired.verdict.kind == "undecided" and unpaired.speedup is None
    with pytest.raises(ValueError, match=r"Comparison: runs has two of O2 FP16 with seed 1; .*give each run"):
        compare(base, [level[1], level[1]])


@pytest.mark.parametrize(
    "ms, words",
    [
        ((10, 10, 10), "as fast"),
        ((5, 4, 2), "2.5x faster"),
        ((10.2, 10, 9.8), "as fast"),
        ((8, 10, 5), "speed not clear"),
        ((8, 16, 5), "speed not clear"),
        ((20, 40, 80), "4.0x slower"),
        ((9.8, 9.6, 9.5), "1.04x faster"),
    ],
)
def test_a_verdict_states_the_speed(ms, words):
    base, level = seeds("O0", 1.0, 1.25, 1.5, ms=10), seeds("O2", 1.0, 1.25, 1.5)
    for run, each in zip(level, ms, strict=True):
        run.seconds = [each / 1000] * 40
    made = compare(base, level)
    assert made.levels[1].verdict.text.startswith(words + ", ")
    assert made.summary.startswith("Use O2" if "x faster" in words else "Stay with O0")


def test_step_times_exclude_warm_up_and_unmeasured_steps():
    times = [9.0] * 4 + [math.nan] * 6 + [1.0] * 20 + [2.0, math.inf, 0.0] + [1.0] * 7
    assert measures.step_times(Run("O0", seconds=times)) == [1.0] * 20 + [2.0] + [1.0] * 7
    assert measures.step_times(Run("O0", seconds=[9.0, 1.0])) == [1.0], "the first step at least"
    assert measures.step_times(Run("O0", seconds=[9.0])) == []
    run = made_up_run(ms=10, samples=[8, 0] * 20)
    run.seconds[5] = math.nan
    assert measures.samples_per_second(run) == pytest.approx(800)
    assert measures.samples_per_second(made_up_run(samples=[0] * 40)) is None


@pytest.mark.parametrize("count", [1, 2])
def test_steps_of_several_sizes_are_timed_by_their_mean(count):
    """Two small steps, in which the level is slower, and a large one, in which it is faster: 102 ms and 54 ms."""
    sizes = [4, 4, 4096] * 30
    base, level = ([made_up_run(name, seed, 90, samples=sizes) for seed in range(count)] for name in ("O0", "O2"))
    for run in base:
        run.seconds = [0.001, 0.001, 0.1] * 30
    for run in level:
        run.seconds = [0.002, 0.002, 0.05] * 30
    assert measures.speedup(list(zip(base, level, strict=True))) == pytest.approx((102 / 54,) * 3)
    assert measures.step_times(level[0]) == pytest.approx([0.018] * 81)
    made = compare(base, level)
    assert made.levels[1].speedup.pace == "faster"
    level[0].samples = [4] * 89  # not one for each step: not known
    assert measures.step_times(level[0]) == level[0].seconds[9:]


def test_the_speed_range_of_one_run_comes_from_quartiles():
    base, level = made_up_run("O0"), made_up_run("O2")
    base.seconds = [0.0, 4.0, 4.0, 8.0, 16.0, 16.0]
    level.seconds = [0.0, 2.0, 2.0, 4.0, 8.0, 8.0]
    assert measures.speedup([(base, level)]) == Ratio(2.0, 0.5, 8.0)
    assert measures.speedup([(base, Run("O2", seconds=[1.0]))]) is None


@pytest.mark.parametrize(
    ("loads", "low", "high"),
    [
        ((0.0, 0.0), 1.25, 1.25),
        ((0.5, 0.5), 1.25, 1.25),  # it slows both alike
        ((0.5, 0.0), 0.625, 1.25),  # it may have slowed the baseline to half its speed
        ((0.0, 0.5), 1.25, 2.5),
        ((1.0, 0.0), 0.0625, 1.25),
    ],
)
@pytest.mark.parametrize("seeds", [1, 2])
def test_other_work_beside_one_run_of_a_pair_widens_the_range_of_speeds(loads, low, high, seeds):
    of_base, of_level = loads
    pairs = [
        (made_up_run("O0", seed, ms=10, other_work=of_base), made_up_run("O2", seed, ms=8, other_work=of_level))
        for seed in range(seeds)
    ]
    assert measures.speedup(pairs) == pytest.approx((1.25, low, high))


def test_memory_on_a_cpu_is_tensors_plus_activations():
    runs = [*seeds("O0", 1.0, 1.25, 1.5), *seeds("O2", 1.0, 1.25, 1.5)]
    for run in runs:  # its tensors take 16,000 bytes; the peak of the process is not used
        run.device, run.peak_memory = "cpu", (170_000 if run.level == "O0" else 340_000)
        run.activations = (24_000 if run.level == "O0" else 4_000) + run.seed
    found = compare(runs)
    base, level = found.levels
    assert (base.activations, base.memory_bytes) == (24_001, 40_001)
    assert (level.activations, level.memory_bytes, level.bytes_ratio) == (4_001, 20_001, 1.0)
    assert level.memory == level.memory_ratio == 20_001 / 40_001
    assert "50 % less memory" in level.verdict.text
    assert found.summary == "Use O2 FP16: 50 % less memory, as fast, same loss over 3 seeds."
    runs[-1].activations = 23_000  # one run took as much
    assert compare(runs).summary.startswith("Stay with O0: O2 FP16 would do as well, but not faster")
    for run in runs:
        run.activations = None
    level = compare(runs).levels[1]
    assert (level.activations, level.memory_bytes, level.memory_ratio, level.memory) == (None, None, None, 1.0)
    assert "same memory for weights and optimizer" in level.verdict.text

"""Recommendations as data and in words; the notes and the JSON of a comparison."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from compared_runs import compare, judge, logs, made_up_run, seeds

from amp_patch.comparison import headline
from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.level_result import LevelResult
from amp_patch.diagnose.recording.run import Run, dumps, loads
from amp_patch.run.machine import machine


def summary_and_card(ms, memory):
    level = seeds("O5", 1.25, 1.0, 1.5, dtype="bfloat16", peak_memory=int(memory * 2**20))
    for run, each in zip(level, ms, strict=True):
        run.seconds = [each / 1000] * 40
    made = compare(seeds("O0", 1.0, 1.25, 1.5), level)
    return made.summary, (headline.headline(made), headline.gains(made), headline.outcome(made.levels[1], made))


@pytest.mark.parametrize(
    ("ms", "memory", "gains"),
    [
        ((8.0, 7.9, 8.1), 0.6, "1.25x faster, 40 % less memory"),
        ((9.9, 10.1, 10.0), 0.6, "40 % less memory, as fast"),
        # A little slower with each seed, which does not outweigh the memory that it saves,
        ((10.2, 10.1, 10.3), 0.6, "40 % less memory, as fast"),
        # and with one of them by more, when something else ran.
        ((10.2, 10.1, 11.0), 0.6, "40 % less memory, as fast"),
        # As little faster is no reason before memory.
        ((9.8, 9.9, 9.0), 0.6, "40 % less memory, 1.02x faster"),
        ((9.8, 9.9, 9.0), 1.0, "1.02x faster, same memory"),
        ((8.0, 10.0, 12.5), 0.6, "40 % less memory, speed not clear"),
    ],
)
def test_a_level_is_recommended_for_its_speed_or_its_memory(ms, memory, gains):
    summary, card = summary_and_card(ms, memory)
    assert summary == f"Use O5 BF16: {gains}, same loss over 3 seeds."
    assert card == ("Use O5 (BF16)", f"{gains}, same loss over 3 seeds", "use this")


@pytest.mark.parametrize(
    ("ms", "memory", "said", "outcome"),
    [
        ((12.5, 12.4, 12.6), 0.6, "(40 % less memory, but 1.25x slower) would do as well.", "as good, slower"),
        *(
            (ms, memory, "would do as well, but not faster, nor in much less memory.", "as good, as fast")
            for ms, memory in [((10.0, 9.9, 10.1), 1.0), ((10.2, 10.1, 10.3), 0.97)]
        ),
    ],
)
def test_a_level_without_gains_is_not_recommended(ms, memory, said, outcome):
    assert summary_and_card(ms, memory) == (f"Stay with O0: O5 BF16 {said}", ("Stay with O0 (FP32)", "", outcome))


def test_a_summary_names_what_undecided_levels_would_gain():
    base, same = seeds("O0", 1.0), {"dtype": "bfloat16", "peak_memory": 2**19}
    levels = seeds("O4", 1.1, **same), seeds("O5", 1.1, **same, ms=8), seeds("O2", 1.1, **same, ms=20)
    assert compare(base, *levels).summary == (
        "Stay with O0 for now: O4 BF16 (50 % less memory, loss +10 %), O5 BF16 (1.25x faster, 50 % less memory, "
        "loss +10 %) and O2 BF16 (2.0x slower, 50 % less memory, loss +10 %) cannot be judged yet, run three "
        "seeds or more."
    )


def test_a_failed_run_is_named_with_its_error():
    base = seeds("O0", 1.0, 1.25, 1.5)
    ended = [Run("O2", 1, error="exit 3: no such file"), Run("O2", 2, error="exit 3: no such file")]
    made = compare(base, [*seeds("O2", 1.25), *ended], [Run("O3", 0, dtype="float16"), Run("O3", 1, error="boom")])
    o2, o3 = made.levels[1:]
    assert (o2.level, o2.dtype, o2.seeds, o2.failed) == ("O2", "float16", [0], ended), "they join their level"
    assert o2.verdict.kind == "so far" and o2.verdict.text.endswith("; failed with seeds 1 and 2: exit 3: no such file")
    assert o3.verdict.kind == "failed" and not o3.runs and o3.final == []
    assert o3.verdict.text == "failed with seed 0: recorded no step; failed with seed 1: boom"
    assert not o3.verdict.usable and o3.speedup is None and o3.step_ms is None
    stopped = made_up_run("O1", 0, error="exit 1 after 40 steps")  # it has losses, but of fewer steps than asked for
    assert compare(base, [stopped]).levels[1].verdict.text == "failed with seed 0: exit 1 after 40 steps"


def test_levels_keep_the_given_order_and_o0_is_the_baseline():
    same = (1.0, 1.25)
    made = compare(
        seeds("O5", *same, dtype="bfloat16"),
        seeds("O1", *same),
        seeds("O0", *same),
        seeds("O1", *same, dtype="bfloat16"),
    )
    assert [level.name for level in made.levels] == ["O5 BF16", "O1 FP16", "O0", "O1 BF16"]
    assert made.baseline is made.levels[2] and made.baseline.verdict.kind == "baseline"
    without = replace(made, runs=[run for run in made.runs if run.level != "O0"])
    assert without.baseline is without.levels[0]
    assert without.levels[1].verdict.text.startswith("as fast, same memory; ")
    # O0 ran out of memory: the next level is the baseline, and a note says so.
    broke = [Run("O0", seed, error="out of memory") for seed in range(2)]
    made = compare(broke, seeds("O2", *same), seeds("O3", *same))
    assert made.baseline.level == "O2" and made.comparable and made.levels[0].verdict.kind == "failed"
    assert made.notes == ["O0 gave no results; the others are compared with O2 FP16"]


def test_losses_are_compared_over_the_steps_that_all_runs_trained():
    base, level = seeds("O0", 1.0, 1.25), seeds("O2", 1.0, 1.25)
    level[1].loss = [5.0] * 19 + [8.0]
    made = compare(base, level)
    assert made.steps == 20
    # Over 20 steps, the last tenth is two losses: 5 and 8 of O2, and two of the falling curve 4, 3.9, ... of O0.
    assert made.levels[1].final[1] == 6.5
    assert made.levels[0].final[0] == pytest.approx((base[0].loss[18] + base[0].loss[19]) / 2)
    assert made.notes == [
        "O2 seed 1: trained only 20 steps",
        "the losses are compared over the 20 steps that all runs have in common",
    ]
    asked = replace(made, asked_steps=50)
    assert asked.notes[0] == "O0 seed 0, O0 seed 1 and O2 seed 0: trained 40 of the 50 steps asked for"
    assert compare(base, asked_steps=50).notes == ["all runs: trained 40 of the 50 steps asked for"]
    assert compare(base, asked_steps=40).notes == []


def test_a_comparison_keeps_the_notes_of_its_runs():
    base, level = seeds("O0", 1.0, 1.25, notes=["no batch known"]), seeds("O2", 1.0, 1.25, notes=["no batch known"])
    level[0].notes = ["no batch known", "the weights were half already"]
    assert compare(base, level).notes == ["all runs: no batch known", "O2 seed 0: the weights were half already"]


def test_a_logged_metric_replaces_the_loss():
    made = compare(logs("O0", 0.5, 0.75), logs("O2", 0.625, 0.625), metric="accuracy", maximize=True)
    assert "final accuracy 0.6250 within the spread of O0's 2 seeds (0.5000 to 0.7500)" in made.levels[1].verdict.text
    made = compare(logs("O0", 0.5, 0.75), logs("O2", 0.625, None), logs("O3", math.nan, math.inf), metric="accuracy")
    assert made.levels[1].verdict.text.startswith("do not use: gave no accuracy with seed 1; ")
    assert made.levels[2].verdict.text.startswith("do not use: accuracy was not finite with seeds 0 and 1; ")
    made = compare(logs("O0", 0.5), logs("O2", 0.5), metric="held{}out")
    assert not made.comparable
    assert made.summary == "Nothing to compare: no run gave held{}out; they logged accuracy."
    assert made.levels[0].verdict[:2] == ("alone", "gave no held{}out with seed 0")
    made = compare(seeds("O0", 1.0), seeds("O2", 1.0), metric="held")
    assert made.summary == "Nothing to compare: no run gave held; call amp.log(held=...) in the script."
    within = replace(made, asked_steps=10).summary
    assert within.endswith("call amp.log(held=...) in the script, within the 10 steps asked for.")


@pytest.mark.parametrize(
    "groups, words, kinds",
    [
        ([], "Nothing to compare: there is no run.", []),
        ([seeds("O0", 1.0, 1.5)], "Only O0 has results: there is nothing to compare it with.", ["alone"]),
        (
            [seeds("O0", 1.0), [Run("O2", 0, error="boom")]],
            "Only O0 has results: there is nothing to compare it with. O2: failed with seed 0: boom.",
            ["alone", "failed"],
        ),
        (
            [[Run("O0", 0, error="a")], [Run("O2", 0, error="b")]],
            "Nothing to compare: no run went well. O0: failed with seed 0: a. O2: failed with seed 0: b.",
            ["failed", "failed"],
        ),
        (
            [seeds("O0", 1.0, loss=[math.nan]), seeds("O2", 1.0, loss=[1.0, math.inf])],
            "Nothing to compare: all runs of O0 and O2 FP16 diverged.",
            ["alone", "alone"],
        ),
    ],
)
def test_a_summary_says_why_nothing_is_comparable(groups, words, kinds):
    made = compare(*groups)
    assert not made.comparable and made.summary == words
    assert [level.verdict.kind for level in made.levels] == kinds
    assert made.to_dict()["summary"] == words


MORE = "run three seeds or more to judge it"


def test_numbers_show_as_many_digits_as_distinguish_them():
    base = seeds("O0", 1.00001, 1.00003)
    text = judge(base, seeds("O2", 1.00002, 1.00002), margin=1e-9).text
    assert "final loss 1.00002 within the spread of O0's 2 seeds (1.00001 to 1.00003)" in text
    assert "-1002 to -1000" in judge(seeds("O0", -1000.0, -1002.0), seeds("O2", -1001.0, -1001.0), margin=1e-9).text
    assert judge(seeds("O0", 1.0), seeds("O2", 2.5)).text.endswith("final loss 150 % above O0's; " + MORE)
    assert judge(seeds("O0", 0.0), seeds("O2", 0.5)).text.endswith("final loss 0.5 above O0's; " + MORE)
    assert judge(seeds("O0", -2.0), seeds("O2", -3.0)).text.endswith("final loss 50 % below O0's; " + MORE)


def test_a_comparison_is_restored_from_its_json():
    base, level = seeds("O0", 1.0, 1.25), seeds("O2", 1.0, 1.25, ms=5)
    level[1].loss[-1] = math.nan
    made = compare(base, level, [Run("O3", 0, error="boom")], maximize=True, asked_steps=50, machine={"torch": "2.13"})
    told = loads(dumps(made.to_dict()))
    back = Comparison.from_dict(told)
    assert dumps(back.to_dict()) == dumps(made.to_dict())
    assert (back.title, back.metric, back.maximize, back.asked_steps, back.machine) == (
        *("train.py", "loss", True, 50, {"torch": "2.13"}),
    )
    assert told["baseline"] == "O0" and told["comparable"] is True
    o2 = told["levels"][1]
    assert o2["name"] == "O2 FP16" and o2["seeds"] == [0, 1] and o2["failed_seeds"] == []
    assert o2["final"][0] == 1.0 and math.isnan(o2["final"][1])
    assert o2["speedup"] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert o2["verdict"]["kind"] == "differs" and o2["skips"] == [1, 1] and o2["scales"] == [65536.0] * 2
    assert o2["step_ms"] == pytest.approx(5)
    # The JSON has every figure of a level, and every run with every step.
    own = {"runs", "failed", "finding"}  # listed separately, or in the words of the verdict
    assert set(LevelResult.__dataclass_fields__) - own <= set(o2)
    assert [len(run["loss"]) for run in told["runs"]] == [40, 40, 40, 40, 0]


def test_machine_lists_versions_types_and_limits(monkeypatch):
    told = machine()
    assert set(told) - {"tensor_cores", "lacks", "limited"} == {
        "torch",
        "python",
        "cpu",
        "threads",
        "gpu",
        "bfloat16",
        "float16",
    }
    assert ("tensor_cores" in told) is torch.cuda.is_available()
    assert all(isinstance(value, str) and value for value in told.values())
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setattr("amp_patch.run.machine.has_arithmetic", lambda dtype: dtype is torch.float16)
    told = machine()
    assert "ONEDNN_MAX_CPU_ISA=AVX2" in told["limited"] and told["lacks"] == "bfloat16"
    monkeypatch.setattr("amp_patch.run.machine.has_arithmetic", lambda dtype: True)
    assert "lacks" not in machine()
    assert re.match(r"\d+\.\d+", told["torch"]) and int(told["threads"]) == 1


def skipping(runs: list[Run], skipped: int, scale: float = 128.0) -> list[Run]:
    for run in runs:
        run.skipped = [step < skipped for step in range(run.steps)]
        run.scale = [65536.0] * (run.steps - 1) + [scale]
    return runs


def test_a_level_that_skips_most_of_its_steps_is_not_recommended():
    base = seeds("O0", 1.0, 1.25, 1.5)
    for skipped, steps, much in ((20, 40, False), (21, 40, True), (25, 200, True), (24, 200, False), (25, 250, False)):
        o0 = seeds("O0", 1.0, 1.25, 1.5, steps=steps)
        level = skipping(seeds("O2", 1.125, 1.25, 1.25, ms=5, steps=steps), skipped)
        made = compare(o0, level)
        assert made.levels[1].verdict.kind == "so far"
        assert (f"{skipped} of {steps} steps were skipped with seed 0" in made.levels[1].verdict.text) == much
        assert made.summary.startswith("Stay with O0: O2 FP16 skipped too many steps." if much else "Use O2 FP16: 2.0x")
    low = skipping(seeds("O2", 1.125, 1.25, 1.25, ms=5), 19, 2.0**-20)
    assert judge(base, low).text.endswith("; the loss scale fell to 9.5e-07")
    assert "fell" not in judge(base, skipping(seeds("O2", 1.125, 1.25, 1.25, ms=5), 16, 1.0)).text


def test_a_summary_advises_a_step_that_was_not_taken():
    base = seeds("O0", 1.0, 1.25, 1.5)
    assert (
        "O1 FP16 cannot be judged yet, it cannot be told with results this noisy"
        in compare(base, seeds("O1", 1.0, 1.25, 3.0)).summary
    )
    same = seeds("O0", 1.0, 1.0, 1.0)
    made = compare(same, seeds("O2", 1.5, 1.5, 1.5, ms=5))
    assert made.summary.endswith("cannot be judged yet, let the script use the seeds.")
    unknown = compare(base, seeds("O2", 1.125, 1.25, 1.25, seconds=[math.nan] * 40))
    assert unknown.summary == "Stay with O0: O2 FP16 may do as well, but how fast is not known."

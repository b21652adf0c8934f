"""Comparisons of one seed: a level that is good so far, and the command that trains more seeds."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import pytest
from compared_runs import compare, logs, made_up_run, seeds

from amp_patch.__main__ import main
from amp_patch.comparison import headline, page
from amp_patch.comparison.commands import compare as command
from amp_patch.comparison.commands import compare_arguments
from amp_patch.comparison.commands.compare_arguments import again, split
from amp_patch.comparison.commands.report import show
from amp_patch.comparison.other_work import OtherWork
from amp_patch.diagnose.recording.run import NATIVE, Run

BF16 = {"dtype": "bfloat16"}
SMALL = {**BF16, "peak_memory": int(0.73 * 2**20)}
SCRIPT = "train_vit.py -- --depth 6"


def look(*groups, base=2.0, **options):
    return compare(seeds("O0", base), *groups, **{"again": SCRIPT, **options})


def test_one_seed_names_a_level_so_far_and_the_command_for_more_seeds(tmp_path: Path, capsys):
    made = look(seeds("O4", 2.0001, **BF16), seeds("O5", 2.000014, **SMALL))
    assert headline.headline(made) == "So far O5 (BF16)"
    assert headline.gains(made) == "27 % less memory, as fast, loss +0.0007 % with one seed"
    assert made.summary == "So far O5 BF16: 27 % less memory, as fast, loss +0.0007 % with one seed."
    command = f"python -m amp_patch compare --levels O5 --seeds 3 {SCRIPT}"
    show(made, tmp_path)
    assert f"\nTo be sure: {command}\n" in capsys.readouterr().out, "in one line, whatever the width"
    assert f"<pre>{command}</pre>" in page.html(made)
    assert (headline.outcome(made.levels[2], made), headline.state(made.levels[2], made)) == ("so far", "unsure")


@pytest.mark.parametrize(
    ("level", "headline_", "levels"),
    [
        (seeds("O5", 2.003, **BF16, ms=5), "So far O5 (BF16)", "O5"),
        (seeds("O5", 2.0100, **SMALL, ms=5), "Stay with O0 (FP32) for now", "O5"),  # beyond the margin
        (seeds("O5", 2.003, **BF16), "Stay with O0 (FP32) for now", "O5"),  # gains nothing
        (seeds("O5", 2.003, **SMALL, ms=20), "Stay with O0 (FP32) for now", "O5"),  # and costs time
        (seeds("O5", 1.700, **BF16), "So far O5 (BF16)", "O5"),  # better
        (seeds("O3", 2.003, **SMALL), "So far O3 (BF16)", "O3"),  # compared alone
        (seeds("O5", 2.003, **SMALL, objectives=2), "Stay with O0 (FP32) for now", ""),  # a GAN's sum
        (seeds("O5", 9.000, **SMALL), "Stay with O0 (FP32)", ""),  # collapsed
        (seeds("O5", 2.000, **SMALL), "Use O5 (BF16)", ""),  # to the bit
        (seeds(NATIVE, 2.003, **SMALL), "So far the script's own mixed precision (BF16)", ""),  # which is no level
    ],
)
def test_a_command_for_more_seeds_names_the_levels_that_one_seed_leaves_open(level, headline_, levels):
    made = look(level)
    assert headline.headline(made) == headline_
    assert made.to_be_sure == (f"python -m amp_patch compare --levels {levels} --seeds 3 {SCRIPT}" if levels else "")


def test_a_level_that_gains_memory_is_named_before_one_with_a_lower_loss():
    made = look(seeds("O4", 1.95, **BF16), seeds("O5", 1.999, **SMALL))
    assert made.recommended.level == "O5"


def test_a_level_that_saves_memory_is_named_although_its_speed_is_not_clear():
    level = seeds("O5", 2.0, 2.1, **SMALL)[:1]
    level[0].seconds = [0.004, 0.016] * 20
    level[0].loss[-1] += 1e-6
    made = look(level)
    assert level[0] is made.levels[1].runs[0] and made.levels[1].speedup.pace == "not clear"
    assert headline.gains(made).startswith("27 % less memory, speed not clear, loss +")


def test_a_rounded_loss_within_one_step_is_good_so_far():
    base, level = seeds("O0", 2.0), seeds("O5", 2.0, **SMALL)
    level[0].loss = [loss + 2**-7 * (step > 30) for step, loss in enumerate(level[0].loss)]
    level[0].loss_types = ["bfloat16"]
    assert headline.headline(compare(base, level)) == "So far O5 (BF16)"
    level[0].loss_types = []
    assert headline.headline(compare(base, level)) == "Stay with O0 (FP32) for now"


def test_gains_name_the_metric():
    small = logs("O5", 0.7501)
    for run in small:
        run.dtype, run.peak_memory = "bfloat16", 2**19
    made = compare(logs("O0", 0.75), small, metric="accuracy", maximize=True)
    assert headline.gains(made) == "50 % less memory, as fast, accuracy +0.013 % with one seed"


def test_the_command_for_more_seeds_repeats_all_given_options():
    given = "--quick --dtype float16 --steps 20 --seed-flag --seed --metric acc --maximize --margin 1 --out o-p"
    parser = argparse.ArgumentParser()
    compare_arguments.add_arguments(parser)
    own, arguments = split([*given.split(), "-m", "pack.train", "--", "--lr", "a b"])
    args = parser.parse_args(own)
    args.arguments = arguments
    line = again(args)
    own, arguments = split(shlex.split(f"--levels O2 --seeds 3 {line}"))
    back = parser.parse_args(own)
    assert arguments == ["--lr", "a b"]
    expected = {**vars(args), "quick": False, "levels": "O2", "seeds": 3}
    assert {**vars(back), "arguments": arguments} == expected


@pytest.mark.parametrize(
    ("dtype", "levels"), [(None, ("O4", "O5")), ("bfloat16", ("O4", "O5")), ("float16", ("O1", "O2"))]
)
def test_a_quick_comparison_trains_one_seed_and_prints_the_next_command(dtype, levels, tmp_path, monkeypatch, capsys):
    plans = []

    def measured_quickly(plan, *_) -> tuple[list[Run], int, int, OtherWork]:
        plans.append(plan)
        runs = [made_up_run(level) for level in ("O0", "O4")]
        runs[1].loss[-1] += 0.001  # else O4 is O0 to the bit, and one seed tells
        return runs, 2, 0, OtherWork()

    (tmp_path / "train.py").write_text("")
    monkeypatch.setattr(command, "_measure", measured_quickly)
    options = [] if dtype is None else ["--dtype", dtype]
    main(["compare", "--quick", *options, "--out", str(tmp_path), str(tmp_path / "train.py"), "--", "--lr", "0.1"])
    (plan,) = plans
    assert (plan.levels, plan.seeds) == (("O0", *levels), 1)
    printed = " ".join(capsys.readouterr().out.split())
    script = [f"--out={tmp_path}", str(tmp_path / "train.py"), "--", "--lr", "0.1"]
    again = shlex.join([*(["--dtype=" + dtype] if dtype is not None else []), *script])
    said = f"python -m amp_patch compare --levels O4 --seeds 3 {again}"
    assert f"To be sure: {said} " in printed and f"<pre>{said}</pre>" in (tmp_path / "report.html").read_text()
    assert printed.startswith(f"starting O0, {', '.join(levels)} "), "before the runs"

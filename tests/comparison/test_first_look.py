"""Comparisons of one seed: a level that is good so far, and the command that trains more seeds."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from pathlib import Path

import pytest
from compared_runs import compare, made_up_run, seeds

from amp_patch.__main__ import main
from amp_patch.comparison import headline, page, what_next
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
    command = f"python -m amp_patch compare --levels O4,O5 --seeds 3 {SCRIPT}"
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
        (seeds(NATIVE, 2.003, **SMALL), "So far your script as it is (BF16)", ""),  # which is no level
    ],
)
def test_a_command_for_more_seeds_names_the_levels_that_one_seed_leaves_open(level, headline_, levels):
    made = look(level)
    assert headline.headline(made) == headline_
    assert what_next.to_be_sure(made) == (
        f"python -m amp_patch compare --levels {levels} --seeds 3 {SCRIPT}" if levels else ""
    )


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
    expected = {**vars(args), "quick": False, "levels": "O2", "seeds": 3, "out": Path("amp_compare")}
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
    script = [str(tmp_path / "train.py"), "--", "--lr", "0.1"]
    again = shlex.join([*(["--dtype=" + dtype] if dtype is not None else []), *script])
    said = f"python -m amp_patch compare --levels O4 --seeds 3 --out={tmp_path}-sure {again}"
    assert f"To be sure: {said} " in printed and f"<pre>{said}</pre>" in (tmp_path / "report.html").read_text()
    assert printed.startswith(f"starting O0, {', '.join(levels)} "), "before the runs"


# ---------------------------------------------------------------------------------------------------------------------
# The last line of a report's card: the command to run next, or advice in words

IN_BF16 = {"dtype": "bfloat16"}
BASE = seeds("O0", 2.0, 2.02, 1.98)
OPTIONS = "--steps=40 --metric=loss --min-gain=8.0 --seed-flag=--seed train.py -- --lr 1"
ASKED = {"again": OPTIONS, "command": "train.py --lr 1", "folder": "o"}
RESUME = "python -m amp_patch compare --resume o"
SEARCH = "python -m amp_patch search --level {} --steps=40 --metric=loss --seed-flag=--seed train.py -- --lr 1"


def off(percent: float, **fields) -> list[Run]:
    return seeds("O5", *(base * (1 + percent / 100) for base in (2.0, 2.02, 1.98)), **IN_BF16, **fields)


@pytest.mark.parametrize(
    ("groups", "options", "purpose", "command"),
    [
        ((BASE, off(0.02, ms=5)), {}, "use it without an edit", "AMP_PATCH_OPT_LEVEL=O5 python -m amp_patch run train"),
        ((BASE, off(1)), {}, "find the modules that O5 needs in a higher precision", SEARCH.format("O5")),
        (
            (BASE[:1], off(0.02)[:1]),
            {},
            "be sure",
            "python -m amp_patch compare --levels O5 --seeds 3 --out=o-sure --steps=40",
        ),
        ((BASE, off(0.02)[:1]), {"asked_runs": 6}, "make the runs that are missing", RESUME),
        ((BASE, seeds("O5", 2.002, 2.0242, 1.982, **IN_BF16, ms=5)), {}, "be sure of the loss", f"{RESUME} --seeds "),
    ],
    ids=["use", "search", "one seed", "cut", "several seeds"],
)
def test_the_card_ends_with_the_command_to_run_next(groups, options, purpose, command, tmp_path, capsys):
    made = compare(*groups, **ASKED, **options)
    told = what_next.commands(made)[-1]
    assert told[0] == purpose and told[1].startswith(command)
    card = page.html(made).partition("</section>")[0]
    assert card.rstrip().endswith(f"<dt>What next, to {purpose}</dt><dd><pre>{told[1]}</pre></dd></dl>")
    show(made, tmp_path)
    assert f"\nTo {purpose}: {told[1]}\nreport: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ((BASE, off(0.02)), "Nothing: O0 is the script as it is."),
        ((BASE, off(0.02, ms=5)), "Train with it."),
        ((BASE, off(0.02, objectives=2)), "Give a figure of quality to amp.log, and judge by --metric."),
        ((BASE[:1], off(0.02)[:1]), "Run three seeds or more."),
        (([Run("O0", error="no")], [Run("O2", error="no")]), "Mend what failed, and compare again."),
    ],
    ids=["no gain", "a notebook's", "a GAN", "one seed of a notebook's", "failures"],
)
def test_without_a_command_the_card_ends_with_words(groups, said):
    made = compare(*groups)
    card = page.html(made).partition("</section>")[0]
    assert what_next.commands(made) == [] and re.search(r"<dt>What next</dt><dd>(.*?)</dd></dl>\s*$", card)[1] == said


def test_no_command_is_advised_that_would_not_help():
    far = seeds("O5", 2.0, 2.03, 1.97, ms=5)
    (use,) = what_next.commands(compare(BASE, far, **ASKED))
    assert use[0] == "use it without an edit", "no --seeds 27"
    lost = seeds("O3", 2.0, 2.02, 1.98, loss=[math.nan] * 40, lost_eps=1e-8)
    assert what_next.commands(compare(BASE, lost, **ASKED)) == []
    collapsed = seeds("O2", 50.0, 51.0, 52.0)
    assert what_next.commands(compare(BASE, collapsed, **ASKED))[-1][1] == SEARCH.format("O2")

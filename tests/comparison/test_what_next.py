"""The last line of a report's card: the command to run next, or advice in words."""

from __future__ import annotations

import math
import re

import pytest
from compared_runs import compare, seeds

from amp_patch.comparison import page, what_next
from amp_patch.comparison.commands.report import show
from amp_patch.diagnose.recording.run import Run

BF16 = {"dtype": "bfloat16"}
BASE = seeds("O0", 2.0, 2.02, 1.98)
OPTIONS = "--steps=40 --metric=loss --min-gain=8.0 --out=o --seed-flag=--seed train.py -- --lr 1"
ASKED = {"again": OPTIONS, "command": "train.py --lr 1", "folder": "o"}
RESUME = "python -m amp_patch compare --resume o"
SEARCH = "python -m amp_patch search --level {} --steps=40 --metric=loss --seed-flag=--seed train.py -- --lr 1"


def off(percent: float, **fields) -> list[Run]:
    return seeds("O5", *(base * (1 + percent / 100) for base in (2.0, 2.02, 1.98)), **BF16, **fields)


@pytest.mark.parametrize(
    ("groups", "options", "purpose", "command"),
    [
        ((BASE, off(0.02, ms=5)), {}, "use it without an edit", "AMP_PATCH_OPT_LEVEL=O5 python -m amp_patch run train"),
        ((BASE, off(1)), {}, "find the modules that O5 needs in a higher precision", SEARCH.format("O5")),
        ((BASE[:1], off(0.02)[:1]), {}, "be sure", "python -m amp_patch compare --levels O5 --seeds 3 --steps=40"),
        ((BASE, off(0.02)[:1]), {"asked_runs": 6}, "make the runs that are missing", RESUME),
        ((BASE, seeds("O5", 2.002, 2.0242, 1.982, **BF16, ms=5)), {}, "be sure of the loss", f"{RESUME} --seeds "),
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


def test_no_search_is_advised_for_a_reason_that_no_module_mends():
    lost = seeds("O3", 2.0, 2.02, 1.98, loss=[math.nan] * 40, lost_eps=1e-8)
    assert what_next.commands(compare(BASE, lost, **ASKED)) == []
    collapsed = seeds("O2", 50.0, 51.0, 52.0)
    assert what_next.commands(compare(BASE, collapsed, **ASKED))[-1][1] == SEARCH.format("O2")

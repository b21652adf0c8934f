"""Tables of `inspect` and `explain` in files and notebooks: whole text, and escaped HTML."""

from __future__ import annotations

import io
from html import unescape

import pytest
import torch
from torch import nn

from amp_patch import amp
from amp_patch.diagnose import wording
from amp_patch.diagnose.histogram import Histogram
from amp_patch.diagnose.inspection import Inspection
from amp_patch.diagnose.tables import Table, as_text
from amp_patch.diagnose.text_table import in_columns

NAME = ".".join(["layers"] * 30)


def shown(html: str) -> str:
    """The text that a notebook shows of a report."""
    assert html.startswith("<pre ") and html.endswith("</pre>") and html.count("<") == 2
    return unescape(html.partition(">")[2].removesuffix("</pre>"))


def explained():
    model = nn.Sequential()
    model.add_module("<b>&amp;", nn.Linear(2, 2))
    inner = nn.Sequential()
    inner.add_module(NAME.replace(".", "_"), nn.Linear(2, 2))
    model.append(inner)
    amp.initialize(model, opt_level="O4", keep_fp32=["<b>&amp;"])
    return amp.explain(model, torch.ones(1, 2)), ["<b>&amp;", f"1.{NAME.replace('.', '_')}", "F.linear", "keep_fp32"]


def inspected():
    seen = Inspection(errors={f"{NAME}.{i}": i / 8 for i in range(9)} | {"<i>": 2.0}, step=3)
    seen.gradients = {f"{NAME}.{i}.weight": Histogram() for i in range(9)}
    for histogram in seen.gradients.values():
        histogram.add(torch.tensor([2.0**-40, 1.0]))
    return seen, ["<i>", "2", f"{NAME}.8", "1", f"{NAME}.0.weight", "50 %"]


@pytest.mark.parametrize("make", [explained, inspected])
def test_notebooks_and_files_show_whole_names(make):
    found, names = make()
    page = shown(found._repr_html_())
    file = io.StringIO()
    print(found, file=file)
    assert file.getvalue() == f"{found}\n"
    text = " ".join(["", *file.getvalue().replace(",", " ").split(), ""])
    for name in names:
        assert name in page and f" {name} " in text


def test_a_notebook_shows_all_rows():
    seen, _ = inspected()
    page = shown(seen._repr_html_())
    assert all(f"{NAME}.{i}\n" in page and f"{NAME}.{i}.weight" in page for i in range(9))
    assert f"{NAME}.0\n" not in str(seen) and len(seen.summary(rows=9)) > len(str(seen))


def test_a_table_is_aligned_as_text_and_escaped_as_html():
    rows = [("a", "1"), (NAME, "22")]
    assert as_text([Table(rows, (("name", "n"),), "title", numbers=True), "line", Table([], title="none")]) == (
        f"title:\n  name   n\n  a      1\n  {NAME}\n        22\nline"
    )
    assert as_text([Table([("a", "b", "c"), ("aa", "bb", "")])]) == "a   b   c\naa  bb"


# ---------------------------------------------------------------------------------------------------------------------
# Columns of text


def test_columns_are_as_wide_as_their_widest_cell_and_lines_end_with_a_word():
    rows = [("level", "batch", "note"), ("O2 FP16", "8", ""), ("O0",)]
    assert in_columns(rows, right=[1]) == ["level    batch  note", "O2 FP16      8", "O0"]
    assert in_columns([]) == []


def test_a_cell_that_is_wider_than_its_column_is_whole():
    assert in_columns([("abc", "d"), ("e", "f")], widths=(2, 1), gap=" ") == ["abc d", "e  f"]


# ---------------------------------------------------------------------------------------------------------------------
# Numbers and names in words


@pytest.mark.parametrize(
    ("share", "words"),
    [(0, "0 %"), (1e-9, "<0.1 %"), (0.0234, "2.3 %"), (0.99, "99 %"), (0.996, ">99 %"), (1, "100 %")],
)
def test_only_all_and_none_are_written_as_such(share, words):
    assert wording.percent(share) == words


def test_a_time_is_rounded_to_its_known_digits():
    times = [0, 9, 14, 94, 95, 360, 5399, 5400, 35000, 90000]
    assert [wording.about(seconds) for seconds in times] == [
        *("under 10 seconds", "under 10 seconds", "about 10 seconds", "about 90 seconds", "about 2 minutes"),
        *("about 6 minutes", "about 90 minutes", "about 1.5 hours", "about 9.7 hours", "about 25 hours"),
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        *((0.123, "0.12 s"), (1.26, "1.3 s"), (41.4, "41 s"), (59.7, "1 min"), (310, "5 min 10 s")),
        *((3599.6, "1 h"), (7500, "2 h 5 min"), (1e7, "2,777 h 47 min")),
    ],
)
def test_a_time_has_its_two_largest_units(seconds, words):
    assert wording.clock_time(seconds) == words

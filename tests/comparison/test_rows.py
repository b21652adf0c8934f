"""The pictures of the card: the gap at the same seeds on the band of the margin, and memory by its parts."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from compared_runs import compare, logs, seeds

from amp_patch.comparison.comparison import Comparison
from amp_patch.comparison.measures import KINDS
from amp_patch.comparison.rows import Row, axis, rows

BASE = (2.0, 2.02, 1.98)
ZERO, HALF = 36.0, 33.0  # per cent of the width: the place of a gap of 0, and half of the axis


def off(*by: float) -> tuple[float, ...]:
    """Return final losses that are these percentages of O0's mean above O0's, seed by seed."""
    return tuple(base + 2 * each / 100 for base, each in zip(BASE, by, strict=True))


def row(made: Comparison, place: int = 1) -> Row:
    return rows(made)[place]


def at(cell: str, pattern: str) -> list[float]:
    return [float(each) for each in re.findall(pattern, cell)]


def dot(cell: str) -> list[float]:
    return at(cell, r'<circle cx="([\d.]+)%"')


def interval(cell: str) -> list[float]:
    """The ends of the horizontal line."""
    return [float(x) for ends in re.findall(r'x1="([\d.]+)%" y1="0" x2="([\d.]+)%" y2="0"', cell) for x in ends]


@pytest.mark.parametrize("by", [0.0007, 0.1, -0.15])
def test_a_gap_of_one_seed_is_drawn_at_its_share_of_the_margin(by):
    cell = row(compare(seeds("O0", 2.0), seeds("O5", 2.0 * (1 + by / 100)))).gap
    assert dot(cell) == [pytest.approx(ZERO + HALF * by / 0.6, abs=0.01)], "the axis ends at three margins"
    assert interval(cell) == []
    (left, width), *_ = re.findall(r'<rect x="([\d.]+)%" y="-1%" width="([\d.]+)%"', cell)
    assert (float(left), float(width)) == (
        pytest.approx(ZERO - HALF / 3, abs=0.01),
        pytest.approx(2 * HALF / 3, abs=0.01),
    )
    assert f">{by:+.2g} %</text>" in cell


def test_a_gap_below_the_spread_of_seeds_is_drawn_with_its_interval():
    made = compare(seeds("O0", *BASE), seeds("O5", *off(0.05, 0.08, 0.11)))
    gap, cell = made.levels[1].finding.gap, row(made).gap
    mean = sum(made.levels[0].finite.values()) / 3
    assert dot(cell) == [pytest.approx(ZERO + HALF * 0.08 / 0.6, abs=0.01)]
    ends = [ZERO + HALF * 100 * end / mean / 0.6 for end in (gap.low, gap.high)]
    assert interval(cell) == pytest.approx(ends, abs=0.01)
    assert "+0.08 %" in cell and "gap to O0 +0.0016 (+0.08 %, 95 %" in row(made).alt


def test_all_levels_share_an_axis_that_ends_at_the_farthest_usable_interval():
    made = compare(
        seeds("O0", *BASE),
        seeds("O2", *off(50, 51, 52)),
        seeds("O4", *off(0.01, 0.02, 0.03)),
        seeds("O5", *off(-12, -12.1, -11.9)),
    )
    far, near, better = (row(made, place).gap for place in (1, 2, 3))
    assert dot(far) == interval(far) == [] and "+51 % →" in far, "not to be used: a number at the edge"
    assert 2 < interval(better)[0] < dot(better)[0] < ZERO < dot(near)[0] < ZERO + 1
    labels = re.findall(r">([^<>]+)</text>", axis(made))
    assert labels == ["-10 %", "0", "+10 %"]


def test_a_level_without_a_gap_shows_a_text_instead():
    made = compare(seeds("O0", *BASE), seeds("O3", *BASE, loss=[float("nan")] * 40))
    assert "3 of 3 not finite" in row(made).gap and ">2.000</text>" in row(made, 0).gap
    zero = compare(seeds("O0", 0.0, 0.0), seeds("O5", 0.5, 0.25))
    assert "+0.38</text>" in row(zero).gap and "%" not in re.sub("<[^>]*>", "", axis(zero)), "no share of 0"
    accuracy = compare(logs("O0", 0.5, 0.75), logs("O2", 0.6, 0.7), metric="accuracy", maximize=True)
    assert len(dot(row(accuracy).gap)) == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_memory_bar_consists_of_its_parts(device):
    sizes = {"weights": 1, "masters": 2, "gradients": 3, "state": 4, "activations": 6}
    fields = {"device": device, "peak_memory": 20 if device == "cuda" else None}
    made = compare(seeds("O0", *BASE, **fields, **sizes), seeds("O5", *BASE, **fields, **{**sizes, "masters": 0}))
    cell, bar = row(made, 0).memory, 74.0
    parts = {
        kind: at(cell, rf'x="([\d.]+)%" y="-8" width="[\d.]+%" height="16" style="fill: var\(--{kind}\)')
        for kind in KINDS
    }
    whole = 16 if device == "cpu" else 20  # on CUDA the peak has a remainder beyond its parts
    starts = [0, 1, 3, 6, 10]
    assert [*parts.values()] == [[pytest.approx(bar * start / whole, abs=0.01)] for start in starts]
    widths = at(cell, r'y="-8" width="([\d.]+)%"')[1:]
    assert sum(widths) == pytest.approx(bar * 16 / whole, abs=0.1)
    assert all(start < end for start, end in pairwise([each[0] for each in parts.values()]))
    assert "var(--masters)" not in row(made).memory

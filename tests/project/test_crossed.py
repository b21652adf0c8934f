"""`crossed` of tests/helpers: its covering part has each combination of values, and the rest of the product is slow."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from crossed import crossed

COLOURS, SIZES, SHAPES = {"red": 1, "green": 2, "blue": 3}, [int, float], ["round", "square", "flat", "long"]


def split(axes, meet):
    """Return the values of the fast cases, and of the slow ones."""
    (_, cases) = crossed(axes, meet=meet).args
    fast = [case.values for case in cases if not case.marks]
    assert all(mark.name == "slow" for case in cases for mark in case.marks)
    return fast, [case.values for case in cases if case.marks]


@pytest.mark.parametrize(("meet", "number"), [(1, 4), (2, 12), (3, 24)])
def test_fast_cases_have_each_combination_and_slow_ones_are_the_rest(meet, number):
    axes = {"colour": COLOURS, "size": SIZES, "shape": SHAPES}
    fast, slow = split(axes, meet)
    assert len(fast) == number and sorted(map(str, fast + slow)) == sorted(
        map(str, product(COLOURS.values(), SIZES, SHAPES))
    )
    for which in combinations(range(3), meet):
        wanted = {tuple(case[i] for i in which) for case in product(COLOURS.values(), SIZES, SHAPES)}
        assert {tuple(case[i] for i in which) for case in fast} == wanted

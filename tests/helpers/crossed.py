"""Parametrization over a product of values, of which only a covering part runs in `make test`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations, product
from typing import Any

import pytest

ParameterSet = type(pytest.param())


def crossed(axes: Mapping[str, Mapping[str, Any] | Iterable[Any]], meet: int = 2) -> pytest.MarkDecorator:
    """Parametrize over the product of `axes`; the cases outside of a covering part are slow.

    Args:
        axes: argument, or arguments with commas -> its values: {id: value}, or `pytest.param`s and values with a name.
        meet: the number of arguments whose values meet. With 1 each value is in the part, with 2 each pair of values.
    """
    values = [_cases(each) for each in axes.values()]
    cases = []
    covered = covering([[not each.marks for each in axis] for axis in values], meet)
    for indexes in product(*(range(len(axis)) for axis in values)):
        chosen = [axis[index] for axis, index in zip(values, indexes, strict=True)]
        marks = [mark for each in chosen for mark in each.marks] or ([] if indexes in covered else [pytest.mark.slow])
        given = [value for each in chosen for value in each.values]
        cases.append(pytest.param(*given, marks=marks, id="-".join(str(each.id) for each in chosen)))
    return pytest.mark.parametrize([name.strip() for key in axes for name in key.split(",")], cases)


def _cases(values: Mapping[str, Any] | Iterable[Any]) -> list[Any]:
    if isinstance(values, Mapping):
        return [pytest.param(value, id=name) for name, value in values.items()]
    return [
        each if isinstance(each, ParameterSet) else pytest.param(each, id=getattr(each, "__name__", str(each)))
        for each in values
    ]


def covering(usable: list[list[bool]], meet: int) -> set[tuple[int, ...]]:
    """Return indexes into axes so that all combinations of usable values of `meet` axes are among them.

    The longest axes go through their product. The sum of their indexes chooses the values of the others. If these
    leave a combination out, the first case that has it is added.
    """
    order = sorted(range(len(usable)), key=lambda axis: -len(usable[axis]))
    free, others = order[:meet], order[meet:]

    def is_diagonal(case: tuple[int, ...]) -> bool:
        return all(case[axis] == sum(case[each] for each in free) % len(usable[axis]) for axis in others)

    all_cases = [
        case for case in product(*(range(len(axis)) for axis in usable)) if all(map(list.__getitem__, usable, case))
    ]
    taken, met = set(), set()
    for case in sorted(all_cases, key=lambda case: not is_diagonal(case)):
        combined = set(combinations(enumerate(case), meet))
        if not combined <= met:
            taken.add(case)
            met |= combined
    return taken

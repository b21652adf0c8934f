"""Parametrization over a product of values, only a covering part of which runs in `make test`."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations, product
from typing import Any

import pytest

ParameterSet = type(pytest.param())


def crossed(
    *axes: pytest.MarkDecorator | Mapping[str, Any], meet: int = 2, impossible: Iterable[tuple[str, ...]] = ()
) -> pytest.MarkDecorator:
    """Parametrize over the product of `axes`; the cases outside of a covering part are slow.

    Args:
        axes: decorators of `pytest.mark.parametrize`, or {argument, or arguments with commas: values}. Values are
            {id: value}, or `pytest.param`s and values that a test's name can have.
        meet: the number of axes whose values meet. With 1 each value is in the part, with 2 each pair of values.
        impossible: ids of values that do not meet: no case has all ids of one of these.
    """
    named = [pair for each in axes for pair in _named(each)]
    values = [_cases(names, each) for names, each in named]
    ids = [[str(each.id) for each in axis] for axis in values]
    possible = [
        indexes
        for indexes in product(*(range(len(axis)) for axis in values))
        if not any({*names} <= {*map(list.__getitem__, ids, indexes)} for names in impossible)
    ]
    covered = covering([[not each.marks for each in axis] for axis in values], meet, possible)
    cases = []
    for indexes in possible:
        chosen = [axis[index] for axis, index in zip(values, indexes, strict=True)]
        marks = [mark for each in chosen for mark in each.marks] or ([] if indexes in covered else [pytest.mark.slow])
        given = [value for each in chosen for value in each.values]
        cases.append(pytest.param(*given, marks=marks, id="-".join(map(list.__getitem__, ids, indexes))))
    return pytest.mark.parametrize([name for names, _ in named for name in names], cases)


def _named(axes: pytest.MarkDecorator | Mapping[str, Any]) -> Iterator[tuple[list[str], Any]]:
    """Yield (arguments, values) of each axis."""
    if isinstance(axes, Mapping):
        for key, values in axes.items():
            yield [name.strip() for name in key.split(",")], values
        return
    names, values = axes.args[0], [*axes.args[1]]  # of a dict, the keys: as pytest does
    names, ids = [*map(str.strip, names.split(","))] if isinstance(names, str) else [*names], axes.kwargs.get("ids")
    rows = values if len(names) == 1 else [each if isinstance(each, ParameterSet) else (*each,) for each in values]
    if ids is not None:
        ids = map(ids, rows) if callable(ids) else ids
        rows = [_param(names, row, id=name) for name, row in zip(ids, rows, strict=True)]
    yield names, rows


def _cases(names: list[str], values: Mapping[str, Any] | Iterable[Any]) -> list[Any]:
    if isinstance(values, Mapping):
        return [_param(names, value, id=name) for name, value in values.items()]
    return [_param(names, each, id=_id(names, each, index)) for index, each in enumerate(values)]


def _param(names: list[str], value: Any, id: str) -> Any:
    if isinstance(value, ParameterSet):
        return pytest.param(*value.values, marks=value.marks, id=value.id or id)
    return pytest.param(*(value if len(names) > 1 else [value]), id=id)


def _id(names: list[str], value: Any, index: int) -> str:
    """Return what a test's name has of a value, as pytest makes it."""
    parts = value.values if isinstance(value, ParameterSet) else value if len(names) > 1 else [value]
    return "-".join(
        str(part)
        if part is None or isinstance(part, (str, numbers.Number))
        else getattr(part, "__name__", f"{name}{index}")
        for name, part in zip(names, parts, strict=True)
    )


def covering(usable: list[list[bool]], meet: int, possible: Iterable[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Return those of the `possible` indexes into axes that have all combinations of usable values of `meet` axes.

    The longest axes go through their product. The sum of their indexes chooses the values of the others. If these
    leave a combination out, the first case that has it is added.
    """
    order = sorted(range(len(usable)), key=lambda axis: -len(usable[axis]))
    free, others = order[:meet], order[meet:]

    def is_diagonal(case: tuple[int, ...]) -> bool:
        return all(case[axis] == sum(case[each] for each in free) % len(usable[axis]) for axis in others)

    all_cases = [case for case in possible if all(map(list.__getitem__, usable, case))]
    taken, met = set(), set()
    for case in sorted(all_cases, key=lambda case: not is_diagonal(case)):
        combined = set(combinations(enumerate(case), meet))
        if not combined <= met:
            taken.add(case)
            met |= combined
    return taken

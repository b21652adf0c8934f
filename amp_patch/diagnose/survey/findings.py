"""`Finding`, which the rules of a survey yield, and functions that the rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from amp_patch.diagnose.survey.calls import Call
from amp_patch.diagnose.survey.kinds import KINDS, Kind, Kinds, Place
from amp_patch.policy import LOW_PRECISION


class Finding(NamedTuple):
    """One problem that levels would cause at a call.

    Attributes:
        kinds: the kinds of levels that would cause the problem.
        what: the problem, in words.
        edit: a change of user code that avoids the problem.
        line: the line of user code at fault, if it is not the line of the call; else None.
        op: the operation at fault, if it is not the function of the call; else "".
        raises: whether the problem is an error, which a level without that error does not have.
        served: whether `run` and `compare` train an unedited script without the problem.
    """

    kinds: Kinds
    what: str
    edit: str
    line: Place | None = None
    op: str = ""
    raises: bool = False
    served: bool = False


Rule = Callable[[Call], Iterator[Finding]]


def type_names(kinds: Iterable[Kind]) -> str:
    return " and ".join(dict.fromkeys(kind.type_name for kind in sorted(kinds, key=KINDS.index)))


def where(kinds: Kinds, happens: Callable[[torch.dtype], bool]) -> Kinds:
    """Return the members of `kinds` for whose type `happens` returns True. Calls `happens` once for each type."""
    types = [dtype for dtype in LOW_PRECISION if any(kind.dtype is dtype for kind in kinds) and happens(dtype)]
    return frozenset(kind for kind in kinds if kind.dtype in types)


def name_of(call: Call, at: int) -> str:
    return call.inputs[at][1].name or f"an operand of {call.op}"


def is_view(call: Call) -> bool:
    """Return whether a call returns a view of its first input, and so computes no numbers."""
    made, given = call.outputs, call.inputs
    if not made or not given or call.func is None:
        return False
    one, other = made[0][0], given[0][0]
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and one is not other

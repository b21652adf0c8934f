"""Kinds of levels that compute alike, and the facts of a tensor at each: its type, its numbers, its origin."""

from __future__ import annotations

import linecache
import os
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from amp_patch.model.masks import is_mask, saturate
from amp_patch.policy import LOW_PRECISION, OPT_LEVELS

_LONGEST = 50  # lines of a statement that are read


class Kind(NamedTuple):
    """Levels that give each tensor of a step the same type.

    Attributes:
        casts: whether these levels cast the model's weights, as O2 does; if not, they cast the arguments of torch's
            functions, as O1 does.
        dtype: the low-precision type of these levels.
        levels: the names of these levels.
    """

    casts: bool
    dtype: torch.dtype
    levels: tuple[str, ...]

    @property
    def type_name(self) -> str:
        return "FP16" if self.dtype is torch.float16 else "BF16"

    @property
    def step(self) -> float:
        """The largest relative error of a number that is rounded to the low-precision type."""
        return torch.finfo(self.dtype).eps / 2

    def holds(self, number: float) -> bool:
        """Whether a finite number stays finite if it is rounded to the low-precision type."""
        info = torch.finfo(self.dtype)
        return abs(number) < info.max / (1 - info.eps / 2) * (1 - info.eps / 4)  # half a step above the largest number

    def vanishes(self, number: float) -> bool:
        """Whether a number other than 0 becomes 0 if it is rounded to the low-precision type."""
        info = torch.finfo(self.dtype)
        return 0 < abs(number) <= info.smallest_normal * info.eps / 2  # half of the type's smallest number


def _kind(casts: bool, dtype: torch.dtype) -> Kind:
    levels = (
        level
        for level, policy in OPT_LEVELS.items()
        if policy.makes_low_tensors and (policy.cast_model_type is not None) == casts and policy.dtype is dtype
    )
    return Kind(casts, dtype, tuple(levels))


KINDS = tuple(_kind(casts, dtype) for casts in (False, True) for dtype in LOW_PRECISION)
CASTING = frozenset(kind for kind in KINDS if kind.casts)
LEVELS = tuple(level for level in OPT_LEVELS if any(level in kind.levels for kind in KINDS))

Kinds = frozenset[Kind]
NONE: Kinds = frozenset()


@dataclass
class Guard:
    """A Python number that keeps a tensor away from 0, as in `x + 1e-8`, but rounds to 0 itself at some levels.

    Attributes:
        number: the Python number.
        kinds: the kinds of levels at which the number rounds to 0.
        line: the line of user code that adds the number.
    """

    number: float
    kinds: Kinds
    line: Place


class Place(NamedTuple):
    """A line of user code.

    Attributes:
        file, line: the innermost code outside of torch and amp_patch.
        called: "train.py:31", the innermost line outside of installed packages, if `file` is in one.
    """

    file: str
    line: int
    called: str = ""

    @property
    def shown(self) -> str:
        """The file and the line: "train.py:31"."""
        path = os.path.relpath(self.file) if self.file else "?"
        return f"{self.file if path.startswith('..') else path}:{self.line}"

    def text(self) -> str:
        """Return the text from the line on, up to the one on which its brackets are closed."""
        text = ""
        for number in range(self.line, self.line + _LONGEST):
            text += linecache.getline(self.file, number)
            if sum(text.count(each) for each in "([{") <= sum(text.count(each) for each in ")]}"):
                break
        return text


@dataclass
class Facts:
    """The state of a tensor of the FP32 step, and the state that it would have at each kind of levels.

    Attributes:
        low: the levels at which it has the low-precision type.
        widened: the levels at which it is FP32, and is a conversion, a view or a clamp of a low-precision tensor.
        permitted: the levels at which it is low precision, and would be FP32 with `allow_banned=True`.
        learned: whether it depends on a parameter. If so, its numbers at a level are not computed.
        raised: whether user code has converted it, or a tensor that it was computed from, to FP32.
        values: if it is not learned, the tensor at each kind of level where its type or numbers differ from FP32's.
        masked: whether its largest negative numbers belong to a mask.
        infinite: the levels at which a mask in it becomes infinite, although it is finite in FP32.
        finite: the levels at which a mask in it stays finite, since user code takes the smallest, or the largest,
            number of the type.
        guard: the number that keeps it away from 0, but rounds to 0 at a level.
        name: if it is an input or a buffer of the model, its name for messages; "" for other tensors.
    """

    low: Kinds = NONE
    widened: Kinds = NONE
    permitted: Kinds = NONE
    learned: bool = False
    raised: bool = False
    values: dict[Kind, Tensor] = field(default_factory=dict)
    masked: bool = False
    infinite: Kinds = NONE
    finite: Kinds = NONE
    guard: Guard | None = None
    name: str = ""


NOTHING = Facts()
# A gradient that a hook of the backward has stored: O1 and O4 have it in the type of the outputs.
STORED = Facts(frozenset(KINDS) - CASTING, learned=True)


def cast(tensor: Tensor, facts: Facts, name: str, *, is_input: bool = False) -> Facts:
    """Return the facts of a tensor as they are after the levels that cast models have cast it, as an input or a buffer.

    The tensor itself stays as it is. If its type is not FP32, return `facts` unchanged.

    Args:
        facts: the facts before the cast.
        name: the tensor's name for messages.
        is_input: whether the tensor is an argument of the model's forward. There a mask's numbers below the type's
            range become the smallest finite number of the type, not -inf.
    """
    if tensor.dtype is not torch.float32:
        return facts
    values = dict(facts.values)
    if not facts.learned:
        for kind in CASTING:
            value = values.get(kind, tensor.detach())
            masks = is_input and is_mask(value, kind.dtype)
            values[kind] = saturate(value, kind.dtype) if masks else value.to(kind.dtype)
    return replace(facts, low=facts.low | CASTING, values=values, name=name)


def uncast(facts: Facts) -> Facts:
    """Return the facts of a tensor after a cast to FP32, as the output of a cast model or the input of a kept module.

    Its type is then FP32 at the levels that cast models; its numbers stay rounded.
    """
    values = {kind: value.float() if kind.casts else value for kind, value in facts.values.items()}
    widened = facts.widened | facts.low & CASTING
    return replace(facts, low=facts.low - CASTING, widened=widened, values=values)

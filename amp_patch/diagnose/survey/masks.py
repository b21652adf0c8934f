"""Additive masks in a survey: tensors with a number far below 0, or far above 0 in a tensor that is subtracted."""

from __future__ import annotations

from torch import Tensor

from amp_patch.diagnose.survey.calls import Call, finite_range
from amp_patch.diagnose.survey.kinds import Kind, Kinds

_LARGE = 2**14  # a number below -2**14 belongs to a mask


def is_two_valued_mask(tensor: Tensor) -> bool:
    """Return whether each number of a tensor is 0 or the same number beyond 2**14 or -2**14, and some are 0. Syncs."""
    low, high = finite_range(tensor)
    far = low if -low > high else high
    if abs(far) <= _LARGE:
        return False
    zeros = tensor == 0
    return bool((zeros | (tensor == far)).all() and zeros.any())


def adds_mask(call: Call) -> bool:
    """Return whether a call adds a mask: a number far below 0, or an unlearned tensor with a number far below 0."""
    if any(number < -_LARGE for number in call.scalars()):
        return True
    return any(_least(call, tensor) < -_LARGE for tensor, facts in call.inputs if not facts.learned)


def mask_at(call: Call) -> tuple[Kinds, Kinds]:
    """Return (kinds at which numbers beyond the type's range stay finite, kinds at which a mask's are infinite)."""
    finite, infinite = set[Kind](), set[Kind]()
    for tensor, facts in call.inputs:
        for kind, value in {} if facts.learned else facts.values.items():
            if not kind.holds(_least(call, tensor)):
                lost = bool((value.isinf() & tensor.isfinite()).any())
                (infinite if lost else finite).add(kind)
    return frozenset(finite), frozenset(infinite)


def _least(call: Call, tensor: Tensor) -> float:
    """Return the lowest number that a tensor brings into a sum or difference."""
    low, high = finite_range(tensor)
    subtracted = call.args[0 if call.swapped else 1] if call.op == "sub" and len(call.args) > 1 else None
    return -high if tensor is subtracted else low

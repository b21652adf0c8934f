"""Histogram: counts of the numbers of a tensor by their exponent, and the share that FP16 or BF16 cannot hold.

The picture is figure 3 of Micikevicius et al. 2018 (arXiv:1710.03740).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

_LOWEST, _HIGHEST = -127, 127  # the exponents of FP32; its subnormal numbers count at the lowest
# Each exponent e has three slots: |x| is 2**e; |x| is between; |x| is at least (2 - 2**-11) * 2**e, which FP16 rounds
# up to 2**(e+1). The very first slot counts the zeros, since no number is counted as exactly 2**-127. The last slot
# counts infinities and NaNs.
_SLOTS = 3 * (_HIGHEST - _LOWEST + 1) + 1


class Format(NamedTuple):
    """The smallest and the largest exponent of the numbers that neither become 0 nor infinite in a type."""

    smallest: int
    largest: int


# Half of the smallest subnormal number (2**-24 in FP16, 2**-133 in BF16) rounds to 0, as do all smaller numbers.
FORMATS = {torch.float16: Format(-25, 15), torch.bfloat16: Format(-134, 127)}


class Histogram:
    """Counts of numbers x by their exponent e: |x| in [2**e, 2**(e+1)). Zeros and non-finite numbers count separately.

    FP32's subnormal numbers count at -127. FP64's numbers outside of FP32's range count at the ends. Counting is one
    pass on the device of the numbers, without a sync. Reading syncs.

    Attributes:
        slot_counts: the count of each slot (see `_SLOTS`), int64, on the device of the numbers; None before the first.
    """

    def __init__(self) -> None:
        self.slot_counts: Tensor | None = None
        self._known: tuple[int, dict[int, list[int]], int] | None = None  # the last result of `_read`; `add` clears it

    def __repr__(self) -> str:
        exponents = self.counts
        span = f" in 2**{min(exponents)} to 2**{max(exponents)}" if exponents else ""
        return f"Histogram({sum(exponents.values())}{span}, {self.zeros} zero, {self.not_finite} not finite)"

    @torch.no_grad()
    def add(self, values: Tensor, factor: float | Tensor = 1.0) -> None:
        """Count the numbers of `values`, a real floating tensor, after multiplying each by `factor`.

        `factor` is a number, or a tensor of one element. Does not sync.
        """
        values = values.detach().reshape(-1)
        if values.dtype is torch.float64:
            limits = torch.finfo(torch.float32)
            inside = values.abs().clamp(limits.smallest_normal / 2, limits.max)
            values = torch.where(values.isfinite() & (values != 0), inside, values)
        values = values.float()
        if isinstance(factor, Tensor) or factor != 1.0:
            values = values * (factor.to(values) if isinstance(factor, Tensor) else factor)
        bits = values.view(torch.int32) & 0x7FFFFFFF
        # The slot is the sum of three exponent fields: of the next smaller number, of x, of x rounded to 11 bits.
        slots = bits - 1 >> 23
        slots += bits >> 23
        slots += (bits >> 12).add_(1) >> 11
        slots.add_(1).clamp_(max=_SLOTS - 1)
        if values.device.type == "cpu":
            counts = torch.bincount(slots, minlength=_SLOTS)
        else:  # on CUDA bincount would sync, to find the largest slot
            one = torch.ones((), dtype=torch.int64, device=values.device)
            counts = one.new_zeros(_SLOTS).scatter_add_(0, slots.long(), one.expand(slots.shape))
        self.slot_counts = counts if self.slot_counts is None else self.slot_counts + counts.to(self.slot_counts.device)
        self._known = None

    def _read(self) -> tuple[int, dict[int, list[int]], int]:
        """Read the counts from the device. Syncs once.

        Returns:
            zeros: the count of zeros.
            slots: {exponent: the counts of its three slots}, without exponents that have no numbers.
            not_finite: the count of infinite numbers and NaNs.
        """
        if self.slot_counts is None:
            return 0, {}, 0
        if self._known is None:
            zeros, *rest, not_finite = self.slot_counts.tolist()
            rest.insert(0, 0)
            threes = {_LOWEST + place // 3: rest[place : place + 3] for place in range(0, len(rest), 3)}
            self._known = zeros, {exponent: three for exponent, three in threes.items() if any(three)}, not_finite
        return self._known

    @property
    def total(self) -> int:
        """How many numbers were counted."""
        zeros, slots, not_finite = self._read()
        return zeros + sum(map(sum, slots.values())) + not_finite

    @property
    def zeros(self) -> int:
        """How many numbers are 0."""
        return self._read()[0]

    @property
    def not_finite(self) -> int:
        """How many numbers are infinite or NaN."""
        return self._read()[2]

    @property
    def counts(self) -> dict[int, int]:
        """Exponent -> how many numbers, lowest exponent first. Exponents without numbers are left out."""
        return {exponent: sum(three) for exponent, three in self._read()[1].items()}

    def flushed(self, scale: float = 1.0, dtype: torch.dtype = torch.float16) -> float:
        """Return the share of the finite numbers other than 0 that would become 0 in `dtype`, if multiplied by `scale`.

        Exact if `scale` is a power of two. Otherwise it is the share at the next lower power of two.
        """
        slots = self._read()[1]
        low = FORMATS[dtype].smallest - math.frexp(scale)[1] + 1
        # Half of the smallest number itself is a tie, which goes to the even one: 0.
        return _share(slots, (sum(c) for e, c in slots.items() if e < low), slots.get(low, [0])[0])

    def overflowed(self, scale: float = 1.0, dtype: torch.dtype = torch.float16) -> float:
        """Return the share of the finite numbers other than 0 that would become infinite, if multiplied by `scale`.

        Exact for FP16 if `scale` is a power of two. Otherwise it is the share at the next higher power of two. BF16 has
        a coarser last step: up to 2**-8 of the largest exponent's range also becomes infinite, and is not counted.
        """
        slots = self._read()[1]
        fraction, exponent = math.frexp(scale)
        high = FORMATS[dtype].largest - exponent + (fraction == 0.5)
        return _share(slots, (sum(c) for e, c in slots.items() if e > high), slots.get(high, [0])[-1])

    def best_scale(self, dtype: torch.dtype = torch.float16) -> float:
        """Return the largest power of two by which all finite numbers can be multiplied without overflow in `dtype`.

        1 if there are no finite numbers other than 0.
        """
        slots = self._read()[1]
        if not slots:
            return 1.0
        largest = max(slots)
        return 2.0 ** (FORMATS[dtype].largest - largest - (slots[largest][-1] > 0))


def _share(slots: dict[int, list[int]], whole: Iterable[int], part: int) -> float:
    return (sum(whole) + part) / sum(map(sum, slots.values())) if slots else 0.0

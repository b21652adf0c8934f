"""Histogram: how many numbers of a tensor have which power of two as their size, and which of those FP16 can hold.

The picture is that of Micikevicius et al. 2018 (arXiv:1710.03740), figure 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_LOWEST, _HIGHEST = -149, 127  # the exponents of FP32, subnormal numbers included
_EXPONENTS = _HIGHEST - _LOWEST + 1


class Format(NamedTuple):
    """The exponents of the numbers that a type can hold."""

    smallest: int
    largest: int


# Rounding saves the upper half of what is below the smallest subnormal number: 2**-24 in FP16, 2**-133 in BF16.
FORMATS = {torch.float16: Format(-25, 15), torch.bfloat16: Format(-134, 127)}


class Histogram:
    """How many numbers x have the exponent e: |x| in [2**e, 2**(e+1)). Zeros and non-finite ones are counted apart.

    Counting is one pass on the device of the numbers and does not sync; reading syncs.
    """

    def __init__(self) -> None:
        self._counts: Tensor | None = None  # zeros, the exponents, non-finite

    def __repr__(self) -> str:
        exponents = self.counts
        span = f" in 2**{min(exponents)} to 2**{max(exponents)}" if exponents else ""
        return f"Histogram({sum(exponents.values())}{span}, {self.zeros} zero, {self.not_finite} not finite)"

    @torch.no_grad()
    def add(self, values: Tensor, factor: float | Tensor = 1.0) -> None:
        """Count the numbers of a real floating tensor times `factor` (a number, or a tensor of one element)."""
        values = values.detach().reshape(-1).float()
        if isinstance(factor, Tensor) or factor != 1.0:
            values = values * (factor.to(values) if isinstance(factor, Tensor) else factor)
        slots = torch.frexp(values)[1] - _LOWEST  # frexp's fraction is in [0.5, 1): its exponent is one above ours
        slots = torch.where(values == 0, 0, slots)
        slots = torch.where(torch.isfinite(values), slots, _EXPONENTS + 1)
        self._take(torch.bincount(slots, minlength=_EXPONENTS + 2))

    @classmethod
    def merged(cls, several: Iterable[Histogram]) -> Histogram:
        """A new one with what all of them have counted, on the device of the first one that has counted; no sync."""
        merged = cls()
        for each in several:
            if each._counts is not None:
                merged._take(each._counts)
        return merged

    def to_dict(self) -> dict[str, Any]:
        """For JSON: {"zeros": n, "not_finite": n, "exponents": {"-24": n, ...}}, the lowest exponent first. One sync."""
        read = self._read()
        exponents = {str(_LOWEST + slot): count for slot, count in enumerate(read[1:-1]) if count}
        return {"zeros": read[0], "not_finite": read[-1], "exponents": exponents}

    def _take(self, counts: Tensor) -> None:
        self._counts = counts.clone() if self._counts is None else self._counts + counts.to(self._counts.device)

    def _read(self) -> list[int]:
        if self._counts is None:
            return [0] * (_EXPONENTS + 2)
        return self._counts.tolist()

    @property
    def total(self) -> int:
        """All that was counted."""
        return sum(self._read())

    @property
    def zeros(self) -> int:
        return self._read()[0]

    @property
    def not_finite(self) -> int:
        return self._read()[-1]

    @property
    def counts(self) -> dict[int, int]:
        """exponent -> how many numbers, lowest exponent first; those without any are left out."""
        return {_LOWEST + slot: count for slot, count in enumerate(self._read()[1:-1]) if count}

    def flushed(self, scale: float = 1.0, dtype: torch.dtype = torch.float16) -> float:
        """The share, of the finite numbers other than 0, that would become 0 in `dtype` if multiplied by `scale`."""
        low = FORMATS[dtype].smallest - math.floor(math.log2(scale))
        return self._share([count for exponent, count in self.counts.items() if exponent < low])

    def overflowed(self, scale: float = 1.0, dtype: torch.dtype = torch.float16) -> float:
        """The share of them that would become infinite."""
        high = FORMATS[dtype].largest - math.floor(math.log2(scale))
        return self._share([count for exponent, count in self.counts.items() if exponent > high])

    def best_scale(self, dtype: torch.dtype = torch.float16) -> float:
        """The largest power of two that makes none of the numbers infinite in `dtype`; 1 where all are 0."""
        exponents = self.counts
        return 2.0 ** (FORMATS[dtype].largest - max(exponents)) if exponents else 1.0

    def _share(self, some: list[int]) -> float:
        return sum(some) / sum(self.counts.values()) if some else 0.0

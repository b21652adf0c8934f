"""How much of an input's variation rounding removes, feature by feature.

A feature that varies by several times its mean loses about a millionth of its variance in BF16. Its loss grows with the
square of mean / spread: 1 % where the spread is a sixtieth of the mean, and all of it where the spread is below the
type's steps. So the loss tells narrow features (observations around 1,000 with a spread of 1) from all usual inputs, at
any scale.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Few values of a feature may be near to each other by chance. Of 35 kinds of usual inputs, with means of up to 10 times
# the spread, 100 batches of each size lost 0.7 % at most with 8 values, and 0.2 % with 32 and more. With a mean of 20
# times the spread they lost up to 4.4 and 0.7 %. Numbers around 1,000 with a spread of 1 lose 13 % and more in BF16
# with 8 values, and 1.3 to 4 % in FP16 with 64.
_FEW, _MANY = 8, 32
_REMOVED = {_FEW: 0.1, _MANY: 0.01}
_NARROW = 32  # a feature that spans more steps of the type than this loses less than 1 %
_NOISE = 16  # a feature that spans fewer steps of its own type than this is a constant with rounding errors
# A feature of a spread below a tenth of the input's counts little if all have one unit: in an input of many features
# (borders of flattened images), or if its numbers are small (cosines near 1 in a table of positions).
_COLUMNS, _SMALL = 64, 4


class Rounded(NamedTuple):
    """The feature that loses most of its variance, as a share of 1. `axis` is None for all numbers as one feature."""

    removed: float
    axis: int | None
    feature: int
    lowest: float
    highest: float
    step: float


def edges_of(x: Tensor, low: torch.dtype) -> Tensor:
    """Return [smallest number of `x`, largest number, whether a feature may lose its variation in `low`]."""
    narrow = []
    for axis in _axes(x):
        others = [each for each in range(x.dim()) if each != axis]
        lowest, highest = x.amin(others).float(), x.amax(others).float()
        narrow.append(_is_narrow(lowest, highest, x.dtype, low).any())
    return torch.stack([lowest.min(), highest.max(), torch.stack(narrow).any().float()])


def most_rounded(x: Tensor, low: torch.dtype) -> Rounded | None:
    """Return the feature of `x` of which rounding to `low` removes most, if that is more than chance may do. Syncs."""
    worst = None
    for axis in _axes(x):
        rows = (x.reshape(-1, 1) if axis is None else x.movedim(axis, -1).reshape(-1, x.shape[axis])).float()
        if len(rows) < _FEW:
            continue
        lowest, highest = rows.amin(0), rows.amax(0)
        removed = _removed(rows, lowest, highest, low)
        removed[~_is_narrow(lowest, highest, x.dtype, low)] = 0
        size, spread = _size(lowest, highest), rows.std(0)
        one_unit = (size < _SMALL) | (rows.shape[1] > _COLUMNS)
        removed[one_unit & (spread < spread.square().nanmean().sqrt() / 10)] = 0
        feature = int(removed.argmax())
        share = float(removed[feature])
        if share > _REMOVED[_MANY if len(rows) >= _MANY else _FEW] and (worst is None or share > worst.removed):
            type_ = torch.finfo(low)
            step = max(2.0 ** float(size[feature].log2().floor()), type_.smallest_normal) * type_.eps
            worst = Rounded(share, axis, feature, float(lowest[feature]), float(highest[feature]), step)
    return worst


def _axes(x: Tensor) -> list[int | None]:
    """Return the dimensions of `x` that may count its features; None stands for all numbers as one feature.

    Features are counted by the last dimension, or by dimension 1 if it is shorter and has at least two others (channels
    of images and series). The short inputs of three dimensions may be either. A feature of few values is not judged
    alone.
    """
    last = x.dim() - 1
    axes = [last] if last > 0 else []
    if last > 1 and x.shape[1] < x.shape[last]:
        axes = [1, last] if last == 2 else [1]
    return [each if x.numel() >= _FEW * x.shape[each] else None for each in axes] or [None]


def _size(lowest: Tensor, highest: Tensor) -> Tensor:
    return highest.abs().maximum(lowest.abs())


def _is_narrow(lowest: Tensor, highest: Tensor, dtype: torch.dtype, low: torch.dtype) -> Tensor:
    size = _size(lowest, highest)
    span, type_ = highest - lowest, torch.finfo(low)
    steps = (size * type_.eps).clamp_min(type_.smallest_normal * type_.eps)
    noise = size * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return (span > _NOISE * noise) & (span < _NARROW * steps)


def _removed(rows: Tensor, lowest: Tensor, highest: Tensor, low: torch.dtype) -> Tensor:
    """Return, for each column of `rows`, 1 less the square of the correlation between it and its rounded numbers."""
    span = highest - lowest
    exact, rounded = (rows - lowest) / span, (rows.to(low).float() - lowest) / span
    exact, rounded = exact - exact.mean(0), rounded - rounded.mean(0)
    rest = rounded.square().sum(0)
    kept = (exact * rounded).sum(0).square() / (exact.square().sum(0) * rest)
    return torch.where(rest > 0, 1 - kept, 1.0)

"""The meter of lost updates: the share of changes to FP32 weights that would not change a low-precision weight.

An update is lost if the low-precision weight plus the change, rounded to nearest, is the old weight: the change is then
below half the distance between neighbouring numbers. A training without masters (O3) loses this share of its updates at
each step. It is measured on FP32 values: masters, or weights that are FP32 themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from amp_patch.policy import LOW_PRECISION
from amp_patch.watch import questions

_SAMPLE = 2**12  # of a larger parameter, about this many evenly spaced elements are sampled


@dataclass
class Updates:
    """Counts of updates, and of those that low precision would lose.

    Attributes:
        dtype: the low-precision type, "bfloat16" or "float16".
        counts: name of a parameter -> [how many sampled elements the steps changed, how many of these changes would be
            lost].
        step: the number of optimizer steps before the first counted one.
    """

    dtype: str = "bfloat16"
    counts: dict[str, list[int]] = field(default_factory=dict)
    step: int = 0

    def lost(self, module: str = "") -> float | None:
        """Return (number of lost updates) / (number of updates), over all parameters; None if there were no updates.

        With `module`, the name of a module or parameter, only its updates count.
        """
        return share_lost([self], module)


def share_lost(several: Iterable[Updates], module: str = "", dtype: str | None = None) -> float | None:
    """Return (number of lost updates) / (number of updates) over several `Updates`; None if there were no updates.

    With `module`, the name of a module or parameter, only its updates count. With `dtype`, only `Updates` of that
    low-precision type count.
    """
    found = [
        count
        for each in several
        if dtype in (None, each.dtype)
        for name, count in each.counts.items()
        if not module or name == module or name.startswith(f"{module}.")
    ]
    changed = sum(count[0] for count in found)
    return sum(count[1] for count in found) / changed if changed else None


class UpdateMeter:
    """A sample of an optimizer's FP32 weights before a step, for comparison with the same sample after it.

    Args:
        names: id of a parameter -> its name. A parameter that is not in it gets the name known to `initialize`, or else
            its place in the parameter groups as name.

    Attributes:
        dtypes: the types that updates can be counted in: the training's, or both low-precision types if it has none.
    """

    def __init__(self, optimizer: Any, names: Mapping[int, str] = MappingProxyType({})) -> None:
        policy = questions.policy_of(optimizer)
        low = policy is not None and policy.makes_low_tensors
        self.dtypes = (policy.dtype,) if policy is not None and low else LOW_PRECISION
        self._optimizer, self._names = optimizer, names
        self._before = dict(self._values())

    def counts_in(self, dtypes: Sequence[torch.dtype]) -> dict[torch.dtype, dict[str, Tensor]]:
        """Return {low-precision type: {name of a parameter: the two counts of `Updates.counts`}} for each of `dtypes`.

        The counts are int64 tensors [2] on the device. Does not sync with the device.
        """
        found: dict[torch.dtype, dict[str, Tensor]] = {dtype: {} for dtype in dtypes}
        for name, value in self._values():
            for dtype in dtypes if name in self._before else ():
                found[dtype][name] = _count(self._before[name], value, dtype)
        return found

    def _values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, sample of FP32 values) of each parameter that is in low precision, or would be at some level."""
        return questions.fp32_values(self._optimizer, self._names, _sample)


def _sample(value: Tensor) -> Tensor:
    # An odd stride: an even one might sample a single column of a matrix.
    return value.flatten()[:: max(1, value.numel() // _SAMPLE) | 1].clone()


@torch.no_grad()
def _count(before: Tensor, after: Tensor, dtype: torch.dtype) -> Tensor:
    """Count the elements that have changed, and the changes that a weight of `dtype` would lose; int64, shape [2]."""
    if before.shape != after.shape or before.device != after.device:
        return torch.zeros(2, dtype=torch.int64, device=after.device)
    change, low = after - before, before.to(dtype)
    changed = (change != 0) & change.isfinite()
    lost = changed & ((low.float() + change).to(dtype) == low)
    return torch.stack([changed.sum(), lost.sum()])

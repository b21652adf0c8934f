"""Probabilities that low precision has rounded to 0 or 1 before a binary cross entropy: a warning, once."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from amp_patch.casts.state import is_plain_eager
from amp_patch.policy import LOW_PRECISION
from amp_patch.support.device_sync import DeviceNumbers, is_capturing
from amp_patch.support.scripts_line import stacklevel

_told = False
_asked: list[DeviceNumbers] = []  # whether earlier calls got such values, on its way from the device


def look(probabilities: Any) -> None:
    """Warn if `probabilities`, which need a gradient, are or were low precision, and some are exactly 0 or 1.

    What was low precision and is FP32 now has values that one of the low types holds exactly. A CPU's values tell at
    once. Those of a CUDA device are asked for without a wait, and tell at a later call. After the warning no values are
    looked at, until `forget`.
    """
    global _told
    if _told or not (isinstance(probabilities, Tensor) and probabilities.requires_grad and probabilities.numel() > 0):
        return
    if probabilities.dtype not in (torch.float32, *LOW_PRECISION) or probabilities.device.type not in ("cpu", "cuda"):
        return
    if not is_plain_eager() or is_capturing():
        return
    with torch.no_grad():
        _asked.append(DeviceNumbers(_has_rounded(probabilities).reshape(1)))
    while _asked and _asked[0].here():
        if _asked.pop(0).read()[0] and not _told:
            _told = True
            _asked.clear()
            warnings.warn(
                "binary_cross_entropy: some probabilities are exactly 0 or 1, to which low precision has rounded a "
                "sigmoid; the gradient of a wrong one is 0 or NaN, so that it is never learned. Drop the sigmoid "
                "from the model and use binary_cross_entropy_with_logits (torch.nn.BCEWithLogitsLoss), or apply "
                "torch.sigmoid to the model's output, which is FP32, or take O1 or O4 with allow_banned=True",
                stacklevel=stacklevel(),
            )


def forget() -> None:
    """Warn again of the next such value."""
    global _told
    _told = False
    _asked.clear()


def _has_rounded(probabilities: Tensor) -> Tensor:
    """Whether some are 0 or 1, and all are values of a low-precision type: a bool tensor without dimensions."""
    low, high = torch.aminmax(probabilities)
    found = (low == 0) | (high == 1)
    if probabilities.dtype in LOW_PRECISION or (not found.is_cuda and not found):
        return found
    return found & torch.stack([(probabilities.to(low).float() == probabilities).all() for low in LOW_PRECISION]).any()

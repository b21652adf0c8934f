"""Probabilities that low precision has rounded to 0 or 1 before a binary cross entropy: a warning, once."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from torch import Tensor

from amp_patch.casts.state import is_plain_eager
from amp_patch.policy import LOW_PRECISION
from amp_patch.support.device_sync import DeviceNumbers, is_capturing
from amp_patch.support.scripts_line import stacklevel

# By the names of autograd's nodes: what gives the values that came in, what makes a 0 or 1 of others by itself, and
# what rounds to one.
_MOVES = re.compile(
    "(ToCopy|View|UnsafeView|Reshape|ReshapeAlias|Squeeze|Unsqueeze|Select|Slice|Transpose|T|Permute|Clone|Expand|Index"
    "|Cat|Stack|Unbind|Split)Backward"
)
_MAKES_EXACT = re.compile(
    "(Mul|Add|Sub|Rsub|Where|MaskedFill|Clamp|ClampMin|ClampMax|Minimum|Maximum|Relu|Threshold|Hardsigmoid|Hardtanh"
    "|Round|Sign|Fill)Backward"
)
_ROUNDS = re.compile("(Sigmoid|Softmax)Backward")

_told = False
_asked: list[DeviceNumbers] = []  # whether earlier calls got such values, on its way from the device


def look(probabilities: Any) -> None:
    """Warn if `probabilities`, which need a gradient, are or were low precision, and some are exactly 0 or 1.

    What was low precision and is FP32 now has values that one of the low types holds exactly. A CPU's values tell at
    once. Those of a CUDA device are asked for without a wait, and tell at a later call. After the warning no values are
    looked at, until `forget`.

    A 0 that is a mask's, a clamp's or a hard threshold's is no sign: behind these the sigmoid's own result tells.
    """
    global _told
    if _told or not (isinstance(probabilities, Tensor) and probabilities.requires_grad and probabilities.numel() > 0):
        return
    if probabilities.dtype not in (torch.float32, *LOW_PRECISION) or probabilities.device.type not in ("cpu", "cuda"):
        return
    if not is_plain_eager() or is_capturing():
        return
    with torch.no_grad():
        for values in _rounded_to(probabilities):
            _asked.append(DeviceNumbers(_has_rounded(values).reshape(1)))
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


def _rounded_to(probabilities: Tensor) -> list[Tensor]:
    """The values that low precision may have rounded to 0 or 1: `probabilities`, or sigmoids' results they are made of.

    The latter where an operation has made `probabilities` that gives a 0 or 1 by itself.
    """
    left: list[Any] = [probabilities.grad_fn]
    found: list[Tensor | None] = []
    seen, exact = set(left), False
    while left:
        node = left.pop()
        name = "" if node is None else node.name()
        if _MOVES.match(name) or _MAKES_EXACT.match(name):
            exact = exact or not _MOVES.match(name)
            new = {inner for inner, _ in node.next_functions if inner is not None} - seen
            seen |= new
            left += new
        elif not exact:
            return [probabilities]
        elif _ROUNDS.match(name):
            found.append(getattr(node, "_saved_result", None))
    types = (torch.float32, *LOW_PRECISION)
    return [values for values in found if values is not None and values.numel() and values.dtype in types]

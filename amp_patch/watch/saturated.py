"""A warning, given once, for a binary cross entropy whose probabilities low precision has rounded to 0 or 1."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from amp_patch.casts.state import is_plain_eager
from amp_patch.policy import LOW_PRECISION
from amp_patch.support.device_sync import DeviceNumbers, is_capturing
from amp_patch.support.patches import Installation
from amp_patch.support.scripts_line import warn

# Names of autograd's nodes, in three classes. A node of `_MOVES` changes no value. A node of `_MAKES_EXACT` may make an
# exact 0 or 1 (a mask, a clamp). A node of `_ROUNDS` gives an exact 0 or 1 only by rounding in low precision.
_MOVES = re.compile(
    "(ToCopy|View|UnsafeView|Reshape|ReshapeAlias|Squeeze|Unsqueeze|Select|Slice|Transpose|T|Permute|Clone|Expand|Index"
    "|Cat|Stack|Unbind|Split)Backward"
)
_MAKES_EXACT = re.compile(
    "(Mul|Add|Sub|Rsub|Where|MaskedFill|Clamp|ClampMin|ClampMax|Minimum|Maximum|Relu|Threshold|Hardsigmoid|Hardtanh"
    "|Round|Sign|Fill)Backward"
)
_ROUNDS = re.compile("(Sigmoid|Softmax)Backward")

_installation = Installation()
_told = False
_asked: list[DeviceNumbers] = []  # results of earlier calls, on their way from the device to the host


def look(probabilities: Any) -> None:
    """Warn if low precision has rounded some of `probabilities` to exactly 0 or 1, and they require a gradient.

    FP32 probabilities count as rounded if one of the low-precision types holds all of them exactly. On a CPU the
    warning comes at once. On a CUDA device the flag is copied without a sync, and read in a later call. After the
    warning no values are tested until `restore`.

    A 0 or 1 from a mask, a clamp or a hard threshold was not made by rounding. So if such an operation has made
    `probabilities`, the results of the sigmoids before it are tested instead.
    """
    global _told
    if _told or not (isinstance(probabilities, Tensor) and probabilities.requires_grad and probabilities.numel() > 0):
        return
    if probabilities.dtype not in (torch.float32, *LOW_PRECISION) or probabilities.device.type not in ("cpu", "cuda"):
        return
    if not is_plain_eager() or is_capturing():
        return
    _installation.install(lambda patches: patches.on_remove(_forget))
    with torch.no_grad():
        for values in _rounded_to(probabilities):
            _asked.append(DeviceNumbers(_has_rounded(values).reshape(1)))
    while _asked and _asked[0].here():
        if _asked.pop(0).read()[0] and not _told:
            _told = True
            _asked.clear()
            warn(
                "binary_cross_entropy: some probabilities are exactly 0 or 1, to which low precision has rounded a "
                "sigmoid; the gradient of a wrong one is 0 or NaN, so that it is never learned. Drop the sigmoid "
                "from the model and use binary_cross_entropy_with_logits (torch.nn.BCEWithLogitsLoss), or apply "
                "torch.sigmoid to the model's output, which is FP32, or take O1 or O4 with allow_banned=True"
            )


def _forget() -> None:
    global _told
    _told = False
    _asked.clear()


def _has_rounded(probabilities: Tensor) -> Tensor:
    """Return a bool tensor of shape []: whether some value is 0 or 1, and one low type holds all values exactly."""
    low, high = torch.aminmax(probabilities)
    found = (low == 0) | (high == 1)
    if probabilities.dtype in LOW_PRECISION or (not found.is_cuda and not found):
        return found
    return found & torch.stack([(probabilities.to(low).float() == probabilities).all() for low in LOW_PRECISION]).any()


def _rounded_to(probabilities: Tensor) -> list[Tensor]:
    """Return the tensors to test for rounded values, from the graph of `probabilities`.

    The result is `probabilities`, unless a node of `_MAKES_EXACT` is among its last nodes. Then the result is the saved
    results of the sigmoids and softmaxes before such nodes.
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

"""Averages of a cast model's weights: torch's AveragedModel reads the FP32 masters, and `lerp` promotes mixed types.

A low-precision average almost never moves: with a decay of 0.999, a BF16 average does not change until the model's
weight is three times as large. Training updates the masters, and the model's weights are only their roundings.

If a script stores an average in a deepcopy of the model, the average is FP32 (copies.py), and the script blends the
model's low-precision weights into it. Of the functions that scripts use for this, torch's `lerp` alone refuses to mix
types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from amp_patch.masters.masters import links_of, master_of, settle
from amp_patch.model import buffers
from amp_patch.model.forward import AmpModel
from amp_patch.model.fp32_copies import fp32_copy
from amp_patch.policy import LOW_PRECISION
from amp_patch.support.compiled import wraps
from amp_patch.support.patches import Installation, Patches

_installation = Installation()


def install() -> None:
    """Make AveragedModel hold an `fp32_copy` of a cast model and read its masters; make `lerp` promote. Idempotent."""
    _installation.install(_replace)


def _replace(patches: Patches) -> None:
    init, update = AveragedModel.__init__, AveragedModel.update_parameters

    @wraps(init)
    def with_copy(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        init(self, fp32_copy(model) if _is_low_precision(model) else model, *args, **kwargs)

    @wraps(update)
    def from_masters(self: Any, model: Any) -> None:
        in_fp32 = _is_low_precision(model) and not any(p.dtype in LOW_PRECISION for p in self.module.parameters())
        update(self, _Exact(model) if in_fp32 else model)  # type: ignore[arg-type]

    patches.set(AveragedModel, "__init__", with_copy)
    patches.set(AveragedModel, "update_parameters", from_masters)
    for name in ("lerp", "lerp_"):
        patches.set(Tensor, name, _lerp(getattr(Tensor, name)))
        patches.set(torch, f"_foreach_{name}", _foreach_lerp(getattr(torch, f"_foreach_{name}")))


def _lerp(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method `original`, `lerp` or `lerp_`, extended: one operand may be FP32 and the other low precision.

    The result of `lerp` is then FP32, as of `add`. `lerp_` writes its first operand: if that is low precision, torch
    raises as without this.
    """

    @wraps(original)
    def lerp(self: Tensor, end: Tensor, *weight: Any, **weights: Any) -> Tensor:
        if isinstance(end, Tensor) and end.dtype is not self.dtype:
            if self.dtype is torch.float32:
                end = _fp32(end)
            elif end.dtype is torch.float32 and original.__name__ == "lerp":
                self = _fp32(self)
        result: Tensor = original(self, end, *weight, **weights)
        return result

    return lerp


def _foreach_lerp(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `original` (`torch._foreach_lerp`), extended: low-precision tensors may be blended into FP32 tensors."""

    @wraps(original)
    def lerp(self: Any, tensors1: Any, *weight: Any, **weights: Any) -> Any:
        if any(a.dtype is not b.dtype for a, b in zip(self, tensors1, strict=False)):
            tensors1 = [_fp32(b) if a.dtype is torch.float32 else b for a, b in zip(self, tensors1, strict=True)]
        return original(self, tensors1, *weight, **weights)

    return lerp


class _Exact:
    """A stand-in for a cast model, which AveragedModel reads instead: parameters are masters, buffers are FP32."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        settle(links_of(dict.fromkeys(model.parameters())))

    def parameters(self) -> Iterator[Tensor]:
        """Yield masters, and parameters without a master in FP32, in the order of the model's parameters."""
        for param in self._model.parameters():
            master = master_of(param)
            yield _fp32(param) if master is None else master

    def buffers(self) -> Iterator[Tensor]:
        """Yield the buffers in FP32; a buffer that nothing has written since the cast has its exact value."""
        exact = buffers.exact_values(self._model, "")
        for name, buffer in self._model.named_buffers():
            yield exact.get(name, _fp32(buffer))


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOW_PRECISION else tensor


def _is_low_precision(model: Any) -> bool:
    """Tell whether `model` has low-precision weights and is, or contains, a model of a training."""
    return (
        isinstance(model, nn.Module)
        and any(isinstance(module, AmpModel) for module in model.modules())
        and any(param.dtype in LOW_PRECISION for param in model.parameters())
    )

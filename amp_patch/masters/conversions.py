"""Refusal of conversions of modules whose parameters have masters: the conversion would lose the masters' precision.

The model's own class refuses `model.float()`. A part of the model has the user's class, so `nn.Module._apply` is
patched, which `.float()`, `.half()` and `.to(dtype)` call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from amp_patch.support.compiled import wraps
from amp_patch.support.generated_class import Generated
from amp_patch.support.patches import Installation

_installation = Installation()
_NAME = "_apply"  # the method of nn.Module through which all conversions go


def refuse_conversions(has_master: Callable[[Tensor], Any]) -> None:
    """Make modules refuse to convert parameters that have a master, as tested by `has_master`; idempotent."""
    _installation.install(
        lambda patches: patches.set(nn.Module, _NAME, _refusing(getattr(nn.Module, _NAME), has_master))
    )


def _refuses(module: nn.Module) -> bool:
    """Tell whether `module` refuses conversions itself: the generated class of a model of `initialize` does."""
    return isinstance(module, Generated) and getattr(type(module), _NAME) is not getattr(module._amp_base, _NAME)


def _refusing(own: Callable[..., Any], has_master: Callable[[Tensor], Any]) -> Callable[..., Any]:
    @wraps(own)
    def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        refusing = any(module is not self and _refuses(module) for module in self.modules())  # that one raises
        for dtype in set() if refusing else {param.dtype for param in self.parameters() if has_master(param)}:
            try:
                became = fn(torch.empty(0, dtype=dtype, device="cpu")).dtype
            except Exception:  # `fn` fails on an empty CPU tensor: its result is unknown
                continue
            if became is not dtype:
                raise RuntimeError(
                    f"{type(self).__name__}: a conversion to {became} would undo half of initialize(), which made FP32 "
                    f"masters for its parameters in {dtype}: their precision beyond {dtype} would be lost. Call "
                    "amp.restore() for the FP32 model, amp.fp32_copy(model) for an FP32 copy; name modules that must "
                    "stay FP32 in initialize(..., keep_fp32=...)"
                )
        return own(self, fn, *args, **kwargs)

    return _apply

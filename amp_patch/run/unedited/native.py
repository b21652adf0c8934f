"""torch's own mixed precision in an unedited script, `torch.autocast` and GradScaler: disabled or kept."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amp_patch.policy import LOW_PRECISION
from amp_patch.run.unedited.refusal import where
from amp_patch.support.patches import Patches

_OURS = "_amp_is_ours"  # attribute of an autocast: whether amp_patch constructed it
_DISABLED = "_amp_disabled"  # attribute of a GradScaler that a level has disabled
_SCALED = "_amp_scaled_by"  # attribute of a loss scaled by a GradScaler: (unscaled loss, scale)


class NativePrecision:
    """Disables the script's autocasts and GradScalers while it is installed: the level replaces them.

    An autocast that compiled code enters cannot be disabled.

    Args:
        kept: do not disable the autocasts and GradScalers. A loss that a GradScaler has scaled then references the
            unscaled loss and the scale, for `before_scaling`.
        applies: returns whether the script is trained at a level now. If not, autocasts and GradScalers are torch's.

    Attributes:
        seen: the enabled autocasts that the script has entered, and the enabled GradScalers that it has constructed:
            "GradScaler (train.py, line 9)", each once.
    """

    def __init__(self, kept: bool, applies: Callable[[], bool]) -> None:
        self.kept = kept
        self._applies = applies
        self.seen: dict[str, None] = {}
        self._callers = set[Any]()  # of `_note`: the search for a line takes longer than a small step's autocast

    def install(self, patches: Patches) -> None:
        """Replace methods of torch's autocast and GradScaler, until `patches` are removed."""
        autocast, scaler = torch.amp.autocast_mode.autocast, torch.amp.GradScaler
        patches.set(autocast, "__init__", self._marking(autocast.__init__))
        for name in "__enter__", "__exit__":
            patches.set(autocast, name, self._entering(getattr(autocast, name)))
        for name in "__init__", "__setstate__":
            patches.set(scaler, name, self._making(getattr(scaler, name)))

    def _marking(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(autocast: Any, *args: Any, **kwargs: Any) -> None:
            original(autocast, *args, **kwargs)
            caller = sys._getframe(1)
            while caller.f_code.co_name == "__init__" and caller.f_back is not None:  # skips a subclass's __init__
                caller = caller.f_back
            ours = str(caller.f_globals.get("__name__")).partition(".")[0] == "amp_patch"
            setattr(autocast, _OURS, ours)

        return __init__

    def _entering(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def enter_or_exit(autocast: Any, *args: Any) -> Any:
            if not autocast._enabled or getattr(autocast, _OURS, True) or not self._applies():
                return original(autocast, *args)
            if autocast.fast_dtype not in LOW_PRECISION:  # an autocast to FP32 on CUDA: amp_patch casts nothing in it
                return original(autocast, *args)
            self._note("torch.autocast")
            return original(autocast, *args) if self.kept else None if args else autocast

        return enter_or_exit

    def _note(self, what: str) -> None:
        frame = sys._getframe(2)
        caller = (frame.f_code, frame.f_lineno, frame.f_back and frame.f_back.f_lineno)
        if caller not in self._callers:
            self._callers.add(caller)
            self.seen[f"{what}{where()}"] = None

    def _making(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def make(scaler: Any, *args: Any, **kwargs: Any) -> None:
            original(scaler, *args, **kwargs)
            if scaler._enabled and self._applies():
                self._note("GradScaler")
                if not self.kept:
                    scaler._enabled = False
                    setattr(scaler, _DISABLED, True)

        return make

    def note_scaled(self, loss: Tensor, scaled: Tensor, scale: Tensor) -> None:
        """Store `loss`, which a GradScaler has multiplied by `scale`, with the result `scaled`, for `before_scaling`.

        If the script's GradScalers are disabled, do nothing.
        """
        if self.kept and self._applies():
            setattr(scaled, _SCALED, (loss, scale))


def before_scaling(loss: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return (unscaled loss, scale) of a loss that a GradScaler has scaled; for any other loss, (`loss`, None)."""
    found: tuple[Tensor, Tensor | None] = vars(loss).get(_SCALED, (loss, None))
    return found


def is_disabled(scaler: Any) -> bool:
    """Tell whether amp_patch has disabled `scaler`, and not the script."""
    return not scaler._enabled and hasattr(scaler, _DISABLED)

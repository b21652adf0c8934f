"""torch's own mixed precision in an unedited script, `torch.autocast` and GradScaler: disabled or kept; its states."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amp_patch import frontend
from amp_patch.policy import LOW_PRECISION, Policy
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


class ScalerStates:
    """Serves states of disabled GradScalers, with torch's five keys, while it is installed; pickles them as enabled.

    The state dict of a scaler that torch has disabled is empty: a script that logs `scaler.state_dict()["scale"]` would
    fail, and torch's GradScaler would refuse its checkpoint.

    If the level's loss scale is dynamic (O1, O2), the scale and the growth counter in a state are the level's, and a
    loaded state sets them. All other numbers are the GradScaler's own.

    Args:
        policy: the level's policy.
        optimizers: returns the optimizers that are trained at the level now.

    Attributes:
        loaded: the loss scale that the script has loaded last, for `amp_patch.load_state_dict`; None without one.
    """

    def __init__(self, policy: Policy, optimizers: Callable[[], list[Any]]) -> None:
        self._is_dynamic = policy.loss_scale == "dynamic"
        self._optimizers = optimizers
        self._stepped = weakref.WeakKeyDictionary[torch.amp.GradScaler, weakref.ref[Any]]()
        self.loaded: dict[str, Any] | None = None

    def install(self, patches: Patches) -> None:
        """Replace methods of torch's GradScaler, until `patches` are removed."""
        kind = torch.amp.GradScaler
        patches.set(kind, "state_dict", self._giving(kind.state_dict, "scale", "_growth_tracker"))
        patches.set(kind, "__getstate__", self._giving(kind.__getstate__, "_init_scale", "_init_growth_tracker"))
        patches.set(kind, "load_state_dict", self._loading(kind.load_state_dict))
        patches.set(kind, "step", self._stepping(kind.step))

    def _giving(self, original: Callable[..., Any], scale: str, count: str) -> Callable[..., Any]:
        """Return `original`, which returns a state, with the level's numbers at the keys `scale` and `count`."""

        @functools.wraps(original)
        def state_of(scaler: Any) -> dict[str, Any]:
            if not is_disabled(scaler):
                return original(scaler)
            state = _as_enabled(scaler, original)
            if self._is_dynamic and (optimizers := self._optimizers()):
                stepped = self._stepped.get(scaler)
                of: Any = next((each for each in optimizers if stepped and each is stepped()), optimizers[-1])
                level = frontend.state_dict([of])["loss_scaler0"]
                state[scale] = level["loss_scale"]
                # With a counter past its interval, torch's scale would not grow before the next overflow.
                state[count] = max(0, min(level["unskipped"], scaler.get_growth_interval() - 1))
            return state

        return state_of

    def _loading(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def load_state_dict(scaler: Any, state_dict: dict[str, Any]) -> None:
            if not (is_disabled(scaler) and state_dict):  # an empty one is that of a disabled scaler
                return original(scaler, state_dict)
            _as_enabled(scaler, original, state_dict)
            if self._is_dynamic:
                level = {"loss_scale": state_dict["scale"], "unskipped": state_dict["_growth_tracker"]}
                self.loaded = {"loss_scaler0": level}
                for optimizer in self._optimizers():
                    frontend.load_state_dict(self.loaded, [optimizer])

        return load_state_dict

    def _stepping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if is_disabled(scaler):
                self._stepped[scaler] = weakref.ref(optimizer)
            return original(scaler, optimizer, *args, **kwargs)

        return step


def _as_enabled(scaler: Any, method: Callable[..., Any], *args: Any) -> Any:
    scaler._enabled = True
    try:
        return method(scaler, *args)
    finally:
        scaler._enabled = False

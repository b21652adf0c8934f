"""State dicts of an unedited script's GradScalers, which a level has disabled: torch's five keys.

The state dict of a scaler that torch has disabled is empty: a script that logs `scaler.state_dict()["scale"]` would
fail, and torch's GradScaler would refuse its checkpoint.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from amp_patch import frontend
from amp_patch.policy import Policy
from amp_patch.run.unedited.native import is_disabled
from amp_patch.support.patches import Patches


class ScalerStates:
    """Serves states of disabled GradScalers while it is installed, and pickles them as enabled ones.

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

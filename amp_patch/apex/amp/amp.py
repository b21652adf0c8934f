"""`apex.amp.amp`: O1's decorators and registrations, and `init`, which turns O1's casts on for the whole process."""

from __future__ import annotations

from amp_patch.apex.amp._amp_state import _amp_state
from amp_patch.apex.amp.handle import AmpHandle, NoOpHandle
from amp_patch.casts.functions import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)

__all__ = [
    "float_function",
    "half_function",
    "init",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
]


def init(
    enabled: bool = True,
    loss_scale: float | str = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
) -> AmpHandle:
    """Turn the casts of O1 on for the whole process, without a model (the API before `initialize`).

    ``AMP_PATCH_OPT_LEVEL`` in the environment may select O4 or O0 instead; see `AmpHandle`.

    Args:
        enabled: if False, nothing changes, and the returned handle does nothing.
        loss_scale: "dynamic" or a number, for the optimizers that the handle wraps.
        enable_caching, verbose: see `AmpHandle`.
        allow_banned: run functions without a safe FP16 form in FP32 instead of refusing them.

    Returns:
        The handle. `wrap_optimizer(optimizer, num_loss=1)` adds a loss scale; `_deactivate()` turns the casts off.

    Raises:
        ValueError: an invalid loss scale. Nothing was changed then.
    """
    made = AmpHandle(loss_scale, enable_caching, verbose, allow_banned=allow_banned) if enabled else NoOpHandle()
    _amp_state.handle = made
    return made

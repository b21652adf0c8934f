"""`apex.amp` on amp_patch: its functions, and the private names that scripts use."""

from __future__ import annotations

from amp_patch.apex.amp import _process_optimizer, frontend, handle, opt, scaler
from amp_patch.apex.amp._amp_state import _amp_state, master_params
from amp_patch.apex.amp.amp import (
    bfloat16_function,
    float_function,
    half_function,
    init,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from amp_patch.apex.amp.frontend import initialize, load_state_dict, state_dict
from amp_patch.apex.amp.handle import disable_casts, scale_loss

# As in Apex, `apex.amp._amp_state` is the object; `from apex.amp._amp_state import ...` imports from the module.
__all__ = [
    "_amp_state",
    "_process_optimizer",
    "bfloat16_function",
    "disable_casts",
    "float_function",
    "frontend",
    "half_function",
    "handle",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "opt",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "scaler",
    "state_dict",
]

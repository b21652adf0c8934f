"""`apex.amp` on amp_patch: its functions, and the private names that scripts use."""

from __future__ import annotations

from amp_patch.apex.amp import _process_optimizer, amp, frontend, handle, opt, scaler
from amp_patch.apex.amp._amp_state import _amp_state, master_params
from amp_patch.apex.amp.amp import *  # noqa: F403
from amp_patch.apex.amp.frontend import initialize, load_state_dict, state_dict
from amp_patch.apex.amp.handle import disable_casts, scale_loss

# As in Apex, `apex.amp._amp_state` is the object; `from apex.amp._amp_state import ...` imports from the module.
__all__ = ["_amp_state", "_process_optimizer", "disable_casts", "frontend", "handle", "initialize", "load_state_dict"]
__all__ += ["master_params", "opt", "scale_loss", "scaler", "state_dict"]
__all__ += amp.__all__

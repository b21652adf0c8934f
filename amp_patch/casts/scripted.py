"""What torch.jit has compiled: it calls no function of torch's namespace, so that torch's own autocast casts in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from amp_patch.casts.thread_state import is_enabled, set_enabled
from amp_patch.support.tree import tensors

# torch.jit compiles a function once for each set of device types (CPU, CUDA) whose autocast is on, and bakes the dtype
# of that moment into the code: code compiled under FP16 would run in FP16 under BF16 too, and its backward fails. So
# each dtype has a set of device types of its own. torch's default dtype has the device type alone, as in a
# torch.autocast.
_DEFAULTS = {"cpu": torch.bfloat16, "cuda": torch.float16}


def under_autocast(function: Callable[..., Any], args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
    """`function(*args, **kwargs)` as under a torch.autocast to `dtype`, for the device of the tensors that it is given.

    Without autocast's cache of cast weights: that is emptied where the outermost torch.autocast ends, and the weights
    may be stepped before.
    """
    device = next((tensor.device.type for tensor in tensors((args, kwargs))), None)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kinds = (device,) if _DEFAULTS.get(device, dtype) is dtype else tuple(_DEFAULTS)
    before = [(kind, is_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    cached = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)
        for kind in kinds:
            torch.set_autocast_dtype(kind, dtype)
            set_enabled(kind, True)
        return function(*args, **kwargs)
    finally:
        for kind, enabled, earlier in before:
            set_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, earlier)
        torch.set_autocast_cache_enabled(cached)

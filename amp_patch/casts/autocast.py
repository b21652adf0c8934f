"""`amp.autocast` and `amp.disable_casts`: the casts of O1, on or off, in regions that user code enters."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.utils.checkpoint
from torch.compiler import is_dynamo_compiling

from amp_patch.casts import dynamo
from amp_patch.casts.cpu_half import decide_cpu_half, emulate
from amp_patch.casts.install import install, installed
from amp_patch.casts.regions import region
from amp_patch.policy import LOW_PRECISION, Policy
from amp_patch.support.compiled import constant_in_traces
from amp_patch.support.interrupts import whole


def disable_casts() -> region:
    """Return a region of this thread without casts: a context manager and a decorator. Source: Apex's `disable_casts`.

    Inside, torch.autocast is disabled too, and FP16 and BF16 products on a CPU are not emulated.
    """
    return region(None, disables_torch_autocast=True)


@constant_in_traces
def _install_in_trace() -> None:
    if not installed():
        install()
        dynamo.start_late()


@constant_in_traces
def _emulate_in_trace(cpu_half: str, dtype: torch.dtype) -> None:
    emulate(Policy("O1", dtype=dtype, patch_torch_functions=True, cpu_half=cpu_half))


class autocast(region):
    """The casts of O1 as a region of this thread: a context manager, and a decorator of functions and methods.

    The arguments are `torch.autocast`'s. The casts act on tensors of every device. If `dtype` is None, `device_type`
    chooses it (`torch.get_autocast_dtype`: FP16 for "cuda", BF16 for "cpu"). A `device_type` of None means "cuda" if
    CUDA is available, else "cpu". An explicit "cuda" without CUDA warns and casts nothing, as in torch. Products on a
    CPU are computed as `initialize(cpu_half="auto")` does, unless `device_type` is another device. `enabled=False`
    makes a region without casts. `cache_enabled=False` casts a weight at every use; None takes torch's current setting.
    The first entry installs the casts. Regions nest, and one object may be entered again, also by other threads.

    If regions of this class and of `torch.autocast` are nested, the innermost region decides. The region disables an
    outer torch.autocast (`torch.is_autocast_enabled()` returns False), and enables it again on exit. Inside a
    torch.autocast that is entered within the region, these casts do not act. Both hold for `enabled=False` too.

    Raises:
        ValueError: `device_type` is unknown to torch, or `dtype` is neither float16 nor bfloat16.
        TypeError: `device_type` is not a string.
    """

    def __init__(
        self,
        device_type: str | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = True,
    ) -> None:
        super().__init__(autocast_policy(device_type, dtype, enabled), disables_torch_autocast=True)
        self.caches = torch.is_autocast_cache_enabled() if cache_enabled is None else bool(cache_enabled)

    @whole
    def __enter__(self) -> autocast:
        if self.acting is not None:
            if is_dynamo_compiling():
                _install_in_trace()
                _emulate_in_trace(self.acting.cpu_half, self.acting.dtype)
            else:
                install()
                emulate(self.acting)
        super().__enter__()
        return self


def autocast_policy(device_type: Any, dtype: Any, enabled: bool) -> Policy | None:
    """Return the policy of `autocast(device_type, dtype, enabled)`, or None if it casts nothing.

    Raises the errors of `autocast`.
    """
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    default = _autocast_dtype(device_type)
    if dtype is not None and dtype not in LOW_PRECISION:
        wanted = f"{' or '.join(map(str, LOW_PRECISION))}, or None"
        raise ValueError(f"autocast: dtype is {dtype!r}; wanted {wanted}; for FP32 take amp.disable_casts()")
    if enabled and device_type == "cuda" and not torch.cuda.is_available():
        # torch's GradScaler("cuda") is disabled without CUDA too: with casts to FP16, the gradients of an unscaled loss
        # would underflow.
        warnings.warn(
            "autocast: device_type is 'cuda', but CUDA is not available, so nothing is cast; for tensors on the CPU "
            "say 'cpu', or leave device_type out",
            stacklevel=3,
        )
        return None
    if not enabled:
        return None
    dtype = default if dtype is None else dtype
    cpu_half = decide_cpu_half("auto", dtype, device_type == "cpu")
    return Policy("O1", dtype=dtype, patch_torch_functions=True, cpu_half=cpu_half)


def _autocast_dtype(device_type: Any) -> torch.dtype:
    if not isinstance(device_type, str):
        older = f", or amp_patch.cuda.amp.autocast({device_type})" if isinstance(device_type, bool) else ""
        raise TypeError(f"autocast: device_type is {device_type!r}; wanted a string such as 'cuda' or 'cpu'{older}")
    try:
        return torch.get_autocast_dtype(device_type)
    except RuntimeError:
        raise ValueError(
            f"autocast: device_type is {device_type!r}, which torch does not know; wanted the type of a device, "
            "such as 'cuda' or 'cpu'"
        ) from None

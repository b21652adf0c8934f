"""`amp.autocast` and `amp.disable_casts`: the casts of O1 as regions of the user's."""

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


def disable_casts() -> region:
    """A region of this thread without casts: a context manager, and a decorator. Source: Apex's `disable_casts`.

    torch.autocast is off there too. FP16 and BF16 on a CPU are multiplied natively.
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

    The arguments are `torch.autocast`'s. `device_type` chooses no device: the casts act on tensors everywhere; it names
    the device whose default `dtype` is taken where that is None (`torch.get_autocast_dtype`: FP16 for "cuda", BF16 for
    "cpu"). None is "cuda" where there is one, else "cpu"; "cuda" by name where there is none warns and casts nothing,
    as in torch. Products on a CPU are computed as `initialize(cpu_half="auto")` says, unless `device_type` is another
    device. `enabled=False` is a region without casts; `cache_enabled=False` casts a weight at every use (None: as torch
    does around it). The first entry installs the casts. Regions nest, and one object may be entered again, also by
    other threads.

    Of this and `torch.autocast`, the inner one decides. Inside this region, enabled or not, torch's is off
    (`torch.is_autocast_enabled()`, which speaks of torch's alone, is False), and back on afterwards; inside a
    torch.autocast that is entered in here, enabled or not, these casts do not act.

    Raises:
        ValueError: a device type that torch does not know, or a dtype other than float16 and bfloat16.
        TypeError: a device type that is not a string.
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
    """The policy of `autocast(device_type, dtype, enabled)`; None where nothing is cast. Raises as `autocast`."""
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

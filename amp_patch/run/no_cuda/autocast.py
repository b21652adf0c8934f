"""Redirection of torch's and amp_patch's autocast regions for "cuda": they act on the target, by default in FP16.

On a CPU without FP16 arithmetic, torch's FP16 kernels are ten to a hundred times slower than FP32's (cpu_half.py), and
torch's autocast calls them. On such a CPU a torch.autocast in FP16 enters an amp_patch.autocast instead, which emulates
FP16.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from amp_patch.casts import autocast as casts_autocast
from amp_patch.casts import state as casts_state
from amp_patch.casts.cpu_half import resolve_cpu_half
from amp_patch.policy import Policy
from amp_patch.run.no_cuda import devices
from amp_patch.run.no_cuda.devices import is_cuda
from amp_patch.support.compiled import constant_in_traces
from amp_patch.support.patches import Patches


def redirect_autocast(patches: Patches) -> None:
    """Make autocast regions for "cuda" act on the target, and torch's queries about "cuda" report these."""
    autocast = torch.amp.autocast_mode.autocast
    make, asked, told = autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

    @functools.wraps(make)
    def cast_on_target(
        self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if is_cuda(device_type):
            device_type, dtype = devices.target, dtype or torch.get_autocast_dtype("cuda")
        make(self, device_type, dtype, *args, **kwargs)
        self._amp_area = _emulating_region(self)

    patches.set(autocast, "__init__", cast_on_target)
    _enter_emulating_regions(patches, autocast)
    for name in "custom_fwd", "custom_bwd":
        patches.set(torch.amp, name, _cuda_type_is_targets(getattr(torch.amp, name)))

    def is_enabled(device_type: Any = "cuda") -> bool:
        kind = devices.target if is_cuda(device_type) else device_type
        return asked(kind) or (kind == "cpu" and _emulates())

    def dtype_of(device_type: str) -> torch.dtype:
        if not (is_cuda(device_type) or device_type == "cpu") or not is_enabled(device_type):
            return told(device_type)
        return torch.float16 if _emulates() else told(devices.target if is_cuda(device_type) else "cpu")

    for function, asked_for in ((is_enabled, "is_autocast_enabled"), (dtype_of, "get_autocast_dtype")):
        constant_in_traces(function)
        patches.set(torch, asked_for, function)
    policy_of = casts_autocast.autocast_policy

    def of_target(device_type: Any, dtype: Any, enabled: bool) -> Policy | None:
        if device_type is None or (isinstance(device_type, str) and is_cuda(device_type)):
            device_type, dtype = devices.target, dtype or torch.get_autocast_dtype("cuda")
        return policy_of(device_type, dtype, enabled)

    patches.set(casts_autocast, "autocast_policy", of_target)


class _TorchAutocasts(threading.local):
    """The torch.autocast regions of a thread that were replaced by amp_patch's.

    Attributes:
        areas: the amp_patch.autocast regions entered instead, innermost last.
        compiled: whether compiled code is entering a region now. In compiled code only torch's own autocast casts.
    """

    def __init__(self) -> None:
        self.areas: list[casts_autocast.autocast] = []
        self.compiled = False


_torchs = _TorchAutocasts()


def _emulating_region(autocast: Any) -> casts_autocast.autocast | None:
    """Return the amp_patch.autocast to enter instead of a torch.autocast that computes in FP16 on the CPU.

    None if torch's own is to be entered: for another type or device, if this CPU needs no emulation of FP16, and in
    compiled code.
    """
    fp16 = Policy("O1", dtype=torch.float16, patch_torch_functions=True)
    if (
        _torchs.compiled
        or (autocast.device, autocast.fast_dtype) != ("cpu", torch.float16)
        or resolve_cpu_half(fp16, on_cpu=True).emulated is None
    ):
        return None
    return casts_autocast.autocast("cpu", torch.float16, autocast._enabled, autocast._cache_enabled)


def _enter_emulating_regions(patches: Patches, autocast: type) -> None:
    enter, leave = autocast.__enter__, autocast.__exit__  # type: ignore[attr-defined]

    @functools.wraps(enter)
    def __enter__(self: Any) -> Any:
        area = vars(self).get("_amp_area")
        if area is None:
            return enter(self)
        area.__enter__()
        _torchs.areas.append(area)
        return self

    @functools.wraps(leave)
    def __exit__(self: Any, *error: Any) -> Any:
        area = vars(self).get("_amp_area")
        if area is None:
            return leave(self, *error)
        _torchs.areas.pop()
        return area.__exit__(*error)

    patches.set(autocast, "__enter__", __enter__)
    patches.set(autocast, "__exit__", __exit__)
    in_graphs = torch.amp.autocast_mode._enter_autocast

    @functools.wraps(in_graphs)
    def compiled(*args: Any) -> Any:
        _torchs.compiled = True
        try:
            return in_graphs(*args)
        finally:
            _torchs.compiled = False

    for owner in torch.amp, torch.amp.autocast_mode:
        patches.set(owner, "_enter_autocast", compiled)


def _emulates() -> bool:
    """Return whether the innermost region of this thread is a torch.autocast that was replaced by amp_patch's."""
    areas = _torchs.areas
    return bool(areas) and areas[-1].acting is not None and casts_state.current() is areas[-1].acting


def _cuda_type_is_targets(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, device_type: str, **kwargs: Any) -> Any:
        return function(*args, device_type=devices.target if is_cuda(device_type) else device_type, **kwargs)

    return call

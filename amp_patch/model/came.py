"""The types in which parameters and buffers came to `initialize`, where these are FP16 or BF16: `restore` gives them.

Parameters are known by identity, and held weakly. What is not known here came in FP32.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from amp_patch.support import swaps

_params = WeakIdKeyDictionary()
_buffers: weakref.WeakKeyDictionary[nn.Module, dict[str, torch.dtype]] = weakref.WeakKeyDictionary()


def type_of(param: Tensor) -> torch.dtype | None:
    """The low-precision type in which `param` came; None where it came in another, or never."""
    found: torch.dtype | None = _params.get(param)
    return found


def note(param: Tensor, dtype: torch.dtype | None) -> None:
    """Take note that `param` came in `dtype`; None: in none that is to be given back."""
    if dtype is None:
        _params.pop(param, None)
        return
    swaps.install()
    _params[param] = dtype


def note_buffer(module: nn.Module, name: str, dtype: torch.dtype) -> None:
    """Take note that a buffer came in `dtype`, unless it is known from before."""
    _buffers.setdefault(module, {}).setdefault(name, dtype)


def give_buffers_back(model: nn.Module) -> None:
    """Cast the FP32 buffers inside `model` to the types in which they came; a shared one stays shared."""
    done: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        for name, dtype in _buffers.pop(module, {}).items():
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.dtype is torch.float32:
                _, module._buffers[name] = done.setdefault(id(buffer), (buffer, buffer.to(dtype)))


def forget() -> None:
    """Forget the types of all parameters and buffers."""
    _params.clear()
    _buffers.clear()


@swaps.release_in_swaps
def _release(param: Tensor) -> Any:
    dtype = _params.pop(param, None)
    return None if dtype is None else lambda: note(param, dtype)

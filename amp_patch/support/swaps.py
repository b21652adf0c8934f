"""`torch.utils.swap_tensors` refuses a tensor with weak references: holders of such references release them meanwhile.

torch calls it in `module.to(...)` and `load_state_dict`, for each parameter, where a script has set
`torch.__future__.set_swap_module_params_on_conversion(True)`. A tensor stays the same object, and gets another content.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amp_patch.support.compiled import wraps
from amp_patch.support.patches import Installation, Patches

Again = Callable[[], Any]
# Releases its weak references to a tensor; returns a function that makes them again, or None.
Holder = Callable[[Tensor], Again | None]

_holders: list[Holder] = []
_installation = Installation()


def release_in_swaps(holder: Holder) -> Holder:
    """Decorates a function that is called before each swap, for both tensors, once `install` was."""
    _holders.append(holder)
    return holder


def install() -> None:
    """Patch `torch.utils.swap_tensors` to call the holders; idempotent."""
    _installation.install(_replace)


def _replace(patches: Patches) -> None:
    swap = torch.utils.swap_tensors

    @wraps(swap)
    def swap_tensors(t1: Any, t2: Any) -> None:
        released = [again for tensor in (t1, t2) for holder in _holders if (again := holder(tensor)) is not None]
        try:
            swap(t1, t2)
        finally:
            for again in released:
                again()

    patches.set(torch.utils, "swap_tensors", swap_tensors)

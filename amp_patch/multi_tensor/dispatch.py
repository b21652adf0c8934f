"""Which backend runs a kernel, and what happens to a call that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from amp_patch.multi_tensor.backends import extension
from amp_patch.support.blocks import without_grad


def run(
    op: str, in_torch: Callable[..., Any], lists: tuple[Any, ...], rest: tuple[Any, ...], check: Callable[[], None]
) -> Any:
    """``op`` of the extension where it serves the tensors' device, else ``in_torch``; both take ``(*lists, *rest)``."""
    kernels: Any = extension()
    if kernels is not None and all(isinstance(tensors, (list, tuple)) for tensors in lists):
        first = next(iter(lists[0] if lists else rest), None)
        if not isinstance(first, Tensor) or first.device.type in kernels.devices:
            try:
                return getattr(kernels, op)(*lists, *rest)
            except (kernels.Refused, TypeError):  # TypeError is pybind11's: something is no tensor or no number
                check()
                raise
    check()
    return _plainly(in_torch, *lists, *rest)


@without_grad
def _plainly(in_torch: Callable[..., Any], *args: Any) -> Any:
    return in_torch(*args)

"""`apex.multi_tensor_apply`: `multi_tensor_applier`, which calls a function of `amp_C`."""

from __future__ import annotations

from amp_patch.apex.multi_tensor_apply.multi_tensor_apply import MultiTensorApply

__all__ = ["MultiTensorApply", "multi_tensor_applier"]

multi_tensor_applier = MultiTensorApply(2048 * 32)

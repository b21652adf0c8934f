"""`apex.parallel.optimized_sync_batchnorm`: the same class as `apex.parallel.SyncBatchNorm`."""

from __future__ import annotations

from amp_patch.apex.parallel.sync_batchnorm import SyncBatchNorm

__all__ = ["SyncBatchNorm"]

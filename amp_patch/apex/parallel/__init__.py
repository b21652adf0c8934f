"""`apex.parallel`: data parallelism and synchronised batch norm with Apex's names, made of torch's.

As in Apex, `apex.parallel.LARC` is a module; it contains the class LARC.
"""

from __future__ import annotations

from typing import Any

from torch import distributed as _distributed

from amp_patch.apex.parallel.distributed import DistributedDataParallel, Reducer
from amp_patch.apex.parallel.sync_batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group

ReduceOp: Any = getattr(_distributed, "ReduceOp", None)  # None if torch was built without distributed

__all__ = [
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]

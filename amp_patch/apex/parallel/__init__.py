"""`apex.parallel`: data parallelism and synchronised batch norm, over torch's.

`LARC` is the module `apex.parallel.LARC`, which has the class, as in Apex.
"""

from __future__ import annotations

from typing import Any

from torch import distributed as _distributed

from amp_patch.apex.parallel.distributed import DistributedDataParallel, Reducer
from amp_patch.apex.parallel.sync_batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group

ReduceOp: Any = getattr(_distributed, "ReduceOp", None)  # a torch may be built without

__all__ = [
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]

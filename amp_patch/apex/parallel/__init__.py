"""`apex.parallel`: data parallelism and synchronised batch norm, over torch's.

`LARC` is the module `apex.parallel.LARC`, which has the class, as in Apex.
"""

from __future__ import annotations

from torch.distributed import ReduceOp

from amp_patch.apex.parallel.distributed import DistributedDataParallel, Reducer
from amp_patch.apex.parallel.sync_batchnorm import SyncBatchNorm, convert_syncbn_model, create_syncbn_process_group

__all__ = [
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]

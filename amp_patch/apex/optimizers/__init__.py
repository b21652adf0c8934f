"""`apex.optimizers`: Apex's fused optimizers, from amp_patch.optimizers."""

from __future__ import annotations

from amp_patch.apex.optimizers.fused_adagrad import FusedAdagrad
from amp_patch.apex.optimizers.fused_adam import FusedAdam
from amp_patch.apex.optimizers.fused_lamb import FusedLAMB
from amp_patch.apex.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb
from amp_patch.apex.optimizers.fused_novograd import FusedNovoGrad
from amp_patch.apex.optimizers.fused_sgd import FusedSGD

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedSGD"]

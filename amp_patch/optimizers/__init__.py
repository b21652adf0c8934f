"""Apex's fused optimizers: a few passes over all parameters of a step, on CPU and CUDA, FP32 inside.

They take Apex's arguments and keep Apex's state names, and are torch optimizers in every other respect. Each class
documents its differences from torch's.
"""

from __future__ import annotations

from amp_patch.optimizers.adagrad import FusedAdagrad
from amp_patch.optimizers.adam import FusedAdam
from amp_patch.optimizers.common import FusedOptimizer
from amp_patch.optimizers.lamb import FusedLAMB
from amp_patch.optimizers.mixed_precision_lamb import FusedMixedPrecisionLamb
from amp_patch.optimizers.novograd import FusedNovoGrad
from amp_patch.optimizers.sgd import FusedSGD

__all__ = [
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedOptimizer",
    "FusedSGD",
]

"""Apex's fused optimizers: each step makes a few passes over lists of all parameters, on CPU and CUDA, in FP32.

They have Apex's arguments and Apex's names of state. In every other respect they are torch optimizers. Each class
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

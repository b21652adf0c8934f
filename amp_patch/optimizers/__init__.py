"""Apex's fused optimizers: each step makes a few passes over lists of all parameters, on CPU and CUDA, in FP32.

They have Apex's arguments and Apex's names of state. In every other respect they are torch optimizers. Each class
documents its differences from torch's.

Files, the first one to read first:

- `adagrad.py`: FusedAdagrad: Apex's Adagrad, on torch's foreach functions
- `adam.py`: FusedAdam: Apex's Adam and AdamW, on torch's fused kernel
- `common.py`: the base class of the fused optimizers, and `computable`, which prepares lists of tensors for their
  formulas
- `lamb.py`: FusedLAMB: Apex's LAMB, which scales Adam's update of each parameter by norm of parameter / norm of
  update
- `mixed_precision_lamb.py`: FusedMixedPrecisionLamb: Apex's LAMB with FP32 masters of its own, for a GradScaler
- `novograd.py`: FusedNovoGrad: Apex's NovoGrad, momentum on gradients that are divided by a running norm of each
  parameter
- `sgd.py`: FusedSGD: Apex's SGD with momentum, on torch's fused kernel
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

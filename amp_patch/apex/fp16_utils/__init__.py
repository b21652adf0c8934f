"""`apex.fp16_utils`: tools for mixed precision by hand, older than amp. New code should use `amp.initialize`."""

from __future__ import annotations

from amp_patch.apex.fp16_utils import fp16util
from amp_patch.apex.fp16_utils.fp16_optimizer import FP16_Optimizer
from amp_patch.apex.fp16_utils.fp16util import *  # noqa: F403
from amp_patch.apex.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler

__all__ = ["DynamicLossScaler", "FP16_Optimizer", "LossScaler"]
__all__ += fp16util.__all__

"""`amp_patch.integrations.lightning` for scripts that import `pytorch_lightning`, whose classes are others."""

from __future__ import annotations

from pytorch_lightning.plugins import Precision

from amp_patch.integrations.opt_level import OptLevel


class OptLevelPrecision(OptLevel, Precision):
    __doc__ = OptLevel.__doc__

"""The same as `amp_patch.integrations.lightning`, for scripts that import `pytorch_lightning` instead of `lightning`.

The two packages have separate classes, so a plugin for one is not accepted by the other.
"""

from __future__ import annotations

from pytorch_lightning.plugins import Precision

from amp_patch.integrations.opt_level import OptLevel


class OptLevelPrecision(OptLevel, Precision):
    __doc__ = OptLevel.__doc__

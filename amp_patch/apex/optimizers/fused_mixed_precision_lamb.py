"""FusedMixedPrecisionLamb under Apex's path; amp_patch.optimizers.mixed_precision_lamb has it."""

from __future__ import annotations

from amp_patch.optimizers.mixed_precision_lamb import FusedMixedPrecisionLamb

__all__ = ["FusedMixedPrecisionLamb"]

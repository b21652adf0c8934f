"""FusedSGD under Apex's path; amp_patch.optimizers.sgd has it."""

from __future__ import annotations

from amp_patch.optimizers.sgd import FusedSGD

__all__ = ["FusedSGD"]

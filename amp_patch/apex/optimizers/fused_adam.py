"""FusedAdam under Apex's path; amp_patch.optimizers.adam has it."""

from __future__ import annotations

from amp_patch.optimizers.adam import FusedAdam

__all__ = ["FusedAdam"]

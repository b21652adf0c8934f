"""FusedLAMB under Apex's path; amp_patch.optimizers.lamb has it."""

from __future__ import annotations

from amp_patch.optimizers.lamb import FusedLAMB

__all__ = ["FusedLAMB"]

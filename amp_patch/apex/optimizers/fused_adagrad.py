"""FusedAdagrad under Apex's path; amp_patch.optimizers.adagrad has it."""

from __future__ import annotations

from amp_patch.optimizers.adagrad import FusedAdagrad

__all__ = ["FusedAdagrad"]

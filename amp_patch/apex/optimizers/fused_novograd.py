"""FusedNovoGrad under Apex's path; amp_patch.optimizers.novograd has it."""

from __future__ import annotations

from amp_patch.optimizers.novograd import FusedNovoGrad

__all__ = ["FusedNovoGrad"]

"""For `from amp_patch.cuda.amp import autocast, GradScaler`, in place of `from torch.cuda.amp import ...`."""

from __future__ import annotations

from amp_patch.cuda import amp

__all__ = ["amp"]

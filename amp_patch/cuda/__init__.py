"""Names for `from amp_patch.cuda.amp import autocast, GradScaler`, which replaces `from torch.cuda.amp import ...`."""

from __future__ import annotations

from amp_patch.cuda import amp

__all__ = ["amp"]

"""Names for `from amp_patch.cpu.amp import autocast, GradScaler`, which replaces `from torch.cpu.amp import ...`."""

from __future__ import annotations

from amp_patch.cpu import amp

__all__ = ["amp"]

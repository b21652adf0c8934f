"""torch's fused encoder layers: turned off where some of their children stay FP32, and on again."""

from __future__ import annotations

import torch

from amp_patch.support.patches import Patches

_fast_path = Patches()


def forbid_fast_path() -> None:
    """Keep encoder layers from their one fused call in eval mode, which wants all their children of one type."""
    _fast_path.set(torch.backends.mha, "_is_fastpath_enabled", False)


def allow_fast_path() -> None:
    """Undo `forbid_fast_path`."""
    _fast_path.remove()

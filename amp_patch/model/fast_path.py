"""torch's fused encoder layers: turned off, where some of their children stay FP32, until `restore`."""

from __future__ import annotations

import torch

from amp_patch.support.patches import Installation

_installation = Installation()


def forbid_fast_path() -> None:
    """Keep encoder layers from their one fused call in eval mode, which wants all their children of one type."""
    # Each time: the user may have turned it on again since the last.
    _installation.add(lambda patches: patches.set(torch.backends.mha, "_is_fastpath_enabled", False))

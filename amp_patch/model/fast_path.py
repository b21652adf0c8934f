"""torch's fused encoder layers: turned off, where some of their children stay FP32, until `restore`."""

from __future__ import annotations

import torch

from amp_patch.support.patches import Installation

_installation = Installation()


def forbid_fast_path() -> None:
    """Keep encoder layers from their one fused call in eval mode, which wants all their children of one type."""
    # `add`, not `install`: the user may have turned the fast path on again since the last call.
    _installation.add(lambda patches: patches.set(torch.backends.mha, "_is_fastpath_enabled", False))

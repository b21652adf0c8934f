"""CUDA graphs: whether one is being captured, in which the host can ask the device nothing."""

from __future__ import annotations

import torch


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream. What is done now is done again at each replay."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

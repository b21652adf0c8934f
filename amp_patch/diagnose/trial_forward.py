"""A context in which a forward leaves no trace in the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from amp_patch.support.random_states import restored_random_states


@contextmanager
def state_restored(model: nn.Module) -> Iterator[None]:
    """Restore buffers (a batch norm's statistics) and the states of the random generators at the end of the body."""
    # Both the tensor and a copy: a forward may write to a buffer, or replace it by another tensor.
    held = [(m, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    try:
        with restored_random_states():
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in held:
                buffer.copy_(before)
                module._buffers[name] = buffer

"""A context in which a forward leaves no trace in the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def state_restored(model: nn.Module) -> Iterator[None]:
    """Restore buffers (a batch norm's statistics) and the states of the random generators at the end of the body."""
    # Both the tensor and a copy: a forward may write to a buffer, or replace it by another tensor.
    held = [(m, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=sorted(d.index for d in devices)):
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in held:
                buffer.copy_(before)
                module._buffers[name] = buffer

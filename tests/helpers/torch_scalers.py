"""Classes of GradScaler that scripts define themselves."""

from __future__ import annotations

import torch


class Theirs(torch.amp.GradScaler):
    """A GradScaler like FSDP's: it overrides methods of torch's, and calls some of them."""

    def scale(self, outputs):
        return super().scale(outputs)

    def step(self, optimizer, *args, **kwargs):
        return super().step(optimizer, *args, **kwargs)


class Cuda(torch.cuda.amp.GradScaler):
    """torch's older name, which by itself is for CUDA alone."""

    def __init__(self, device, **options):
        torch.amp.GradScaler.__init__(self, device, **options)

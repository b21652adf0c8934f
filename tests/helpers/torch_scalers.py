"""Classes of GradScaler that scripts define themselves, and what torch's own class can unscale."""

from __future__ import annotations

import pytest
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


def skip_if_it_cannot_unscale(kind, dtype, device):
    """Skip if `kind` is torch's GradScaler, and torch has no kernel for it: for BF16 on CUDA torch 2.11 has none."""
    if kind is not torch.amp.GradScaler:
        return
    found, inverse = torch.zeros((), device=device), torch.ones((), device=device)
    try:
        torch._amp_foreach_non_finite_check_and_unscale_([torch.ones(1, dtype=dtype, device=device)], found, inverse)
    except NotImplementedError:
        pytest.skip(f"torch {torch.__version__}: its GradScaler cannot unscale {dtype} on {device}")

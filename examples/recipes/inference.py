"""Inference: a model that FP32 has trained answers in mixed precision. No loss, so no scale."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from common import Run, load, main
from torch import Tensor, nn


def trained(run: Run) -> nn.Module:
    """In FP32, without amp."""
    model = run.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for images, labels in run.batches():
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model.eval()


def held_out(run: Run) -> zip[tuple[Tensor, Tensor]]:
    return zip(*(part.split(64) for part in load(run.device)[1]), strict=True)


def native(amp: Any, run: Run) -> list[float]:
    model = trained(run)
    losses = []
    with torch.inference_mode(), amp.autocast(run.device, dtype=run.dtype):
        for images, labels in held_out(run):
            losses.append(F.cross_entropy(model(images), labels).item())
    return losses


def opt_level(level: str, run: Run) -> list[float]:
    from amp_patch import amp

    # Without an optimizer: at O2, O3 and O5 half of the memory, for there are no masters. A model in training needs
    # nothing at all to be asked in between: the casts are its own.
    model = amp.initialize(trained(run), opt_level=level, dtype=run.dtype)
    losses = []
    with torch.inference_mode():
        for images, labels in held_out(run):
            losses.append(F.cross_entropy(model(images), labels).item())
    return losses


if __name__ == "__main__":
    main(native, opt_level)

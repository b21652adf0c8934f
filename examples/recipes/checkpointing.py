"""Activation checkpointing: backward computes activations again, with the casts and the dropout of the first time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from common import Run, main
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Reader(nn.Module):
    """Keeps the activations at the borders of `features` and `classes`, and none inside of `classes`."""

    def __init__(self, run: Run, reentrant: bool) -> None:
        super().__init__()
        layers = run.model()
        self.features = layers[:3]
        self.classes = nn.Sequential(layers[3], nn.Dropout(0.1), *layers[4:])
        self.reentrant = reentrant

    def forward(self, images: Tensor) -> Tensor:
        return checkpoint(self.classes, self.features(images), use_reentrant=self.reentrant)


def native(amp: Any, run: Run, reentrant: bool = False) -> list[float]:
    model = Reader(run, reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = amp.GradScaler(run.device)
    losses = []
    for images, labels in run.batches():
        optimizer.zero_grad()
        with amp.autocast(run.device, dtype=run.dtype):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def opt_level(level: str, run: Run, reentrant: bool = False) -> list[float]:
    from amp_patch import amp

    model = Reader(run, reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype=run.dtype)
    losses = []
    for images, labels in run.batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main(native, opt_level, reentrant=False)

"""The typical loop: forward under casts, backward of a scaled loss, a step that is skipped on overflow."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from common import Run, main


def native(amp: Any, run: Run) -> list[float]:
    model = run.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = amp.GradScaler(run.device)
    losses = []
    for images, labels in run.batches():
        optimizer.zero_grad()
        with amp.autocast(run.device, dtype=run.dtype):  # forward and loss; backward stays outside
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def opt_level(level: str, run: Run) -> list[float]:
    from amp_patch import amp

    model = run.model()
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
    main(native, opt_level)

"""Gradient accumulation: a batch that would not fit is taken in micro-batches, with one optimizer step for all."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from common import Run, main

MICRO_BATCHES = 4


def native(amp: Any, run: Run) -> list[float]:
    model = run.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = amp.GradScaler(run.device)
    losses = []
    for images, labels in run.batches():
        optimizer.zero_grad()
        total = 0.0
        for part, wanted in zip(images.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES), strict=True):
            with amp.autocast(run.device, dtype=run.dtype):
                loss = F.cross_entropy(model(part), wanted) / MICRO_BATCHES  # their sum is the mean over the batch
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.step(optimizer)  # the scale may move only where the sum is complete
        scaler.update()
        losses.append(total)
    return losses


def opt_level(level: str, run: Run) -> list[float]:
    from amp_patch import amp

    model = run.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype=run.dtype)
    losses = []
    for images, labels in run.batches():
        optimizer.zero_grad()
        total = 0.0
        for part, wanted in zip(images.chunk(MICRO_BATCHES), labels.chunk(MICRO_BATCHES), strict=True):
            loss = F.cross_entropy(model(part), wanted) / MICRO_BATCHES
            # Each exit adds the micro-batch's gradients to the sum, in FP32. With `delay_unscale=True` before the last
            # one autograd adds them in the weights' type: less time and memory, but at O5 a sum of many is rounded.
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


if __name__ == "__main__":
    main(native, opt_level)

"""Inspecting and clipping gradients: both want them unscaled, between backward and the step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from common import Run, main

MAX_NORM = 0.5


def native(amp: Any, run: Run) -> list[float]:
    model = run.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = amp.GradScaler(run.device)
    losses = []
    for images, labels in run.batches():
        optimizer.zero_grad()
        with amp.autocast(run.device, dtype=run.dtype):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # once a step; from here on `.grad` is what it is in FP32
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)  # knows that the gradients are unscaled
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
        # Unscaled now. What the optimizer steps: FP32 masters at O2 and O5, the model's own parameters elsewhere. After
        # an overflow the norm is inf or NaN, and the step is skipped.
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), MAX_NORM)
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main(native, opt_level)

"""A gradient penalty: the loss contains the norm of its own gradients, so backward runs through backward.

Gradients of an unscaled loss may vanish in FP16 on their way. So the first backward is of a scaled loss too, and its
results are divided by the scale where they are FP32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from common import Run, main

WEIGHT = 0.1


def native(amp: Any, run: Run) -> list[float]:
    model = run.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = amp.GradScaler(run.device)
    losses = []
    for images, labels in run.batches():
        optimizer.zero_grad()
        with amp.autocast(run.device, dtype=run.dtype):
            loss = F.cross_entropy(model(images), labels)
        scaled = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        scale = scaler.get_scale()
        grads = [grad / scale for grad in scaled]  # not in `.grad`: the scaler will not see them
        with amp.autocast(run.device, dtype=run.dtype):
            loss = loss + WEIGHT * torch.stack([grad.pow(2).sum() for grad in grads]).sum().sqrt()
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
        scale = amp.loss_scale(optimizer)
        scaled = torch.autograd.grad(loss * scale, list(model.parameters()), create_graph=True)
        grads = [grad.float() / scale for grad in scaled]  # those of low-precision weights are low precision
        loss = loss + WEIGHT * torch.stack([grad.pow(2).sum() for grad in grads]).sum().sqrt()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main(native, opt_level)

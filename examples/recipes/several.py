"""Several models, losses and optimizers: two readers learn alone and as an ensemble. ../gan.py is this at work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from common import Run, main


def native(amp: Any, run: Run) -> list[float]:
    first, second = run.model(), replace(run, seed=run.seed + 100).model()
    sgd = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9)
    adam = torch.optim.Adam(second.parameters(), lr=5e-3, eps=1e-4)
    scaler = amp.GradScaler(run.device)  # one for all
    losses = []
    for images, labels in run.batches():
        sgd.zero_grad()
        adam.zero_grad()
        with amp.autocast(run.device, dtype=run.dtype):
            one, other = first(images), second(images)
            alone = F.cross_entropy(one, labels) + F.cross_entropy(other, labels)
            together = F.cross_entropy(one + other, labels)
        scaler.scale(alone).backward(retain_graph=True)
        scaler.scale(together).backward()
        scaler.step(sgd)  # each optimizer skips on its own account
        scaler.step(adam)
        scaler.update()  # once, after all of them
        losses.append(together.item())
    return losses


def opt_level(level: str, run: Run) -> list[float]:
    from amp_patch import amp

    models = [run.model(), replace(run, seed=run.seed + 100).model()]
    sgd = torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9)
    adam = torch.optim.Adam(models[1].parameters(), lr=5e-3, eps=1e-4)  # FP16, and with it O3, has no smaller eps
    (first, second), (sgd, adam) = amp.initialize(models, [sgd, adam], opt_level=level, dtype=run.dtype, num_losses=2)
    losses = []
    for images, labels in run.batches():
        sgd.zero_grad()
        adam.zero_grad()
        one, other = first(images), second(images)
        alone = F.cross_entropy(one, labels) + F.cross_entropy(other, labels)
        together = F.cross_entropy(one + other, labels)
        # A scale for each loss, and the optimizers whose gradients its backward makes.
        with amp.scale_loss(alone, [sgd, adam], loss_id=0) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
        with amp.scale_loss(together, [sgd, adam], loss_id=1) as scaled_loss:
            scaled_loss.backward()
        sgd.step()
        adam.step()
        losses.append(together.item())
    return losses


if __name__ == "__main__":
    main(native, opt_level)

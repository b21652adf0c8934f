"""A training of a task of examples/tasks.py inside of this process, as examples/train.py makes it in one of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp_patch import amp


def train(task: Any, model: Any, optimizers: list[Any], steps: int, batches: torch.Generator) -> list[Tensor]:
    """Make the steps, with a learning rate that rises for a tenth of them and then falls to 0; the loss of each.

    Args:
        optimizers: of `model`; both have been through `amp.initialize`.

    Returns:
        Tensors of shape [], without a graph. Does not sync.
    """
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / (0.1 * steps), (steps - step) / (0.9 * steps), 1.0)
        )
        for optimizer in optimizers
    ]
    losses = []
    for _ in range(steps):
        inputs, targets = task.batch(batches)
        loss = task.loss(model(inputs), targets)
        for optimizer in optimizers:
            optimizer.zero_grad()
        with amp.scale_loss(loss, optimizers) as scaled_loss:
            scaled_loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        losses.append(loss.detach())
    return losses


def figures(task: Any, model: Any) -> dict[str, float]:
    """What the task tells of a trained model: "held_out_loss" and another; `model` is in eval mode afterwards."""
    model.eval()
    with torch.no_grad():
        found: dict[str, float] = task.evaluate(model)
    return found

"""Train a task of examples/tasks.py inside of this process, as examples/train.py does in its own process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp_patch import amp


def train(task: Any, model: Any, optimizers: list[Any], steps: int, batches: torch.Generator) -> list[Tensor]:
    """Make the steps, and return the loss of each. The learning rate rises for a tenth of them, and then falls to 0.

    Args:
        optimizers: the optimizers of `model`. `amp.initialize` has returned both.

    Returns:
        Tensors of shape [], detached from the graph. Does not sync.
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
    """Return the task's figures of a trained model: "held_out_loss" and another one. `model` is set to eval mode."""
    model.eval()
    with torch.no_grad():
        found: dict[str, float] = task.evaluate(model)
    return found

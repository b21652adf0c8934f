"""Sharpness-aware minimization: a step takes the gradient at the worst weights nearby, where a first backward leads."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from common import Run, main


class Sam:
    """Foret et al. 2021 (arXiv:2010.01412, algorithm 1) around any optimizer::

    first pass:   w' = w + rho * g / |g|      g: the gradient at w
    second pass:  w  = step(w, g')            g': the gradient at w'
    """

    def __init__(self, base_optimizer: torch.optim.Optimizer, rho: float = 0.05) -> None:
        self.base_optimizer, self.rho = base_optimizer, rho
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters, and what they were

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base_optimizer.param_groups

    def step(self) -> None:
        self.base_optimizer.step()

    def zero_grad(self) -> None:
        self.base_optimizer.zero_grad()

    @torch.no_grad()
    def first_step(self) -> None:
        """Move to where the loss is greatest nearby, as far as the gradient knows. An overflowed one moves nothing."""
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.float().norm() for p in params]).norm()
        way = torch.where(norm.isfinite(), self.rho / (norm + 1e-12), 0)
        self.before = [(p, p.clone()) for p in params]
        for p in params:
            p.add_((p.grad.float() * way).nan_to_num(0, 0, 0))
        self.zero_grad()

    @torch.no_grad()
    def back(self) -> None:
        for p, before in self.before:
            p.copy_(before)

    def second_step(self) -> None:
        """Go back, and step with the gradients that were found there."""
        self.back()
        self.step()
        self.zero_grad()


def native(amp: Any, run: Run) -> list[float]:
    model = run.model()
    sam = Sam(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    scaler = amp.GradScaler(run.device)
    losses = []
    for images, labels in run.batches():
        with amp.autocast(run.device, dtype=run.dtype):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(sam.base_optimizer)
        sam.first_step()
        scaler.update()  # so that it unscales a second time
        with amp.autocast(run.device, dtype=run.dtype):
            worst = F.cross_entropy(model(images), labels)
        scaler.scale(worst).backward()
        sam.back()
        scaler.step(sam.base_optimizer)  # skips if this pass overflowed; after the first alone it is a plain step
        scaler.update()
        sam.zero_grad()
        losses.append(loss.item())
    return losses


def opt_level(level: str, run: Run) -> list[float]:
    from amp_patch import amp

    model = run.model()
    sam = Sam(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model, sam = amp.initialize(model, sam, opt_level=level, dtype=run.dtype)
    losses = []
    for images, labels in run.batches():
        loss = F.cross_entropy(model(images), labels)
        with amp.scale_loss(loss, sam) as scaled_loss:
            scaled_loss.backward()
        sam.first_step()
        with amp.scale_loss(F.cross_entropy(model(images), labels), sam) as scaled_loss:
            scaled_loss.backward()
        sam.second_step()  # skips if either pass overflowed: the weights are those of before then
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main(native, opt_level)

"""Saving and resuming: weights, optimizer and loss scale; then the bits are those of a run that never stopped."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import Run, main
from torch import Tensor

Batches = Iterable[tuple[Tensor, Tensor]]


def native(amp: Any, run: Run, stop: bool = True) -> list[float]:
    def build() -> tuple[Any, ...]:
        model = run.model()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), amp.GradScaler(run.device)

    def train(batches: Batches) -> list[float]:
        losses = []
        for images, labels in batches:
            optimizer.zero_grad()
            with amp.autocast(run.device, dtype=run.dtype):
                loss = F.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        return losses

    model, optimizer, scaler = build()
    batches = run.batches()
    losses = train(islice(batches, run.steps // 2))
    if stop:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "checkpoint.pt")
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
            new = path.with_suffix(".new")
            torch.save(states, new)
            new.replace(path)  # a run that is killed meanwhile leaves the old one whole
            model, optimizer, scaler = build()
            states = torch.load(path)
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])
        scaler.load_state_dict(states["scaler"])
    return losses + train(batches)


def opt_level(level: str, run: Run, stop: bool = True) -> list[float]:
    from amp_patch import amp

    def build() -> tuple[Any, ...]:
        model = run.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return amp.initialize(model, optimizer, opt_level=level, dtype=run.dtype)

    def train(batches: Batches) -> list[float]:
        losses = []
        for images, labels in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer = build()
    batches = run.batches()
    losses = train(islice(batches, run.steps // 2))
    if stop:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "checkpoint.pt")
            # At O2 and O5 the model's state is that of the masters: it loads at every level, and without amp.
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
            new = path.with_suffix(".new")
            torch.save(states, new)
            new.replace(path)  # a run that is killed meanwhile leaves the old one whole
            model, optimizer = build()
            states = torch.load(path)
        model.load_state_dict(states["model"])
        optimizer.load_state_dict(states["optimizer"])
        amp.load_state_dict(states["amp"])
    return losses + train(batches)


if __name__ == "__main__":
    main(native, opt_level, stop=True)

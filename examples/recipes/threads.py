"""Several devices in one process: DataParallel runs forward on a thread for each, and casts belong to threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from common import Run, main
from torch import Tensor, nn


def data_parallel(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """nn.DataParallel; with less than two GPUs two threads on one device, each with half of the batch."""
    if torch.cuda.device_count() > 1:
        return nn.DataParallel(model)

    def forward(images: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as threads:
            return torch.cat(list(threads.map(model, images.chunk(2))))

    return forward


def native(amp: Any, run: Run) -> list[float]:
    class Reader(nn.Sequential):
        @amp.autocast(run.device, dtype=run.dtype)  # here, because the region below is another thread's
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images)

    model = Reader(*run.model())
    parallel = data_parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = amp.GradScaler(run.device)
    losses = []
    for images, labels in run.batches():
        optimizer.zero_grad()
        with amp.autocast(run.device, dtype=run.dtype):
            loss = F.cross_entropy(parallel(images), labels)
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
    parallel = data_parallel(model)  # after initialize; the model takes its casts to every thread
    losses = []
    for images, labels in run.batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(parallel(images), labels)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main(native, opt_level)

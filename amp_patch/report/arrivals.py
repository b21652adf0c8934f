"""Events that wait for numbers on a device, which travel to the host in batches, while the training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from amp_patch.casts import regions
from amp_patch.report.runs import Event


class Entry:
    """An event that waits for numbers which may be on a device: `make` is given them, in order."""

    def __init__(self, values: list[Tensor | float], make: Callable[[list[float]], Event]) -> None:
        self.values = values
        self.make = make


class Batch:
    """Entries whose numbers are on their way to the host."""

    @torch.no_grad()
    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        on_device: dict[torch.device, list[Tensor]] = {}
        for entry in entries:
            for value in entry.values:
                if isinstance(value, Tensor) and value.is_cuda:
                    on_device.setdefault(value.device, []).append(value)
        self.arriving: dict[torch.device, tuple[Tensor, Any]] = {}
        for device, tensors in on_device.items():
            with regions.region(None):
                stacked = torch.stack([tensor.reshape(()).double() for tensor in tensors])
            landing = torch.empty(stacked.shape, dtype=stacked.dtype, device="cpu", pin_memory=True)
            landing.copy_(stacked, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(device))
            self.arriving[device] = landing, arrived

    def here(self) -> bool:
        return all(arrived.query() for _, arrived in self.arriving.values())

    def read(self) -> Iterator[Event]:
        """The events; waits for the devices if it must."""
        landed: dict[torch.device, Iterator[float]] = {}
        for device, (landing, arrived) in self.arriving.items():
            arrived.synchronize()
            landed[device] = iter(landing.tolist())
        for entry in self.entries:
            yield entry.make([_read(value, landed) for value in entry.values])


def _read(value: Tensor | float, landed: dict[torch.device, Iterator[float]]) -> float:
    if not isinstance(value, Tensor):
        return value
    return next(landed[value.device]) if value.device in landed else float(value.item())

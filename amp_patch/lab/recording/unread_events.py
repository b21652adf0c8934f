"""Events whose numbers are still on a device. They travel to the host in batches, while the training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from amp_patch.casts import regions
from amp_patch.lab.recording.run import Event
from amp_patch.support.device_numbers import DeviceNumbers


class UnreadEvent:
    """An event that waits for numbers, some of them on a device: `make` is given them, in order, and returns it."""

    def __init__(self, values: list[Tensor | float], make: Callable[[list[float]], Event]) -> None:
        self.values = values
        self.make = make


class UnreadBatch:
    """Events whose numbers are on their way to the host."""

    @torch.no_grad()
    def __init__(self, events: list[UnreadEvent]) -> None:
        self.events = events
        on_device: dict[torch.device, list[Tensor]] = {}
        for event in events:
            for value in event.values:
                if isinstance(value, Tensor) and value.is_cuda:
                    on_device.setdefault(value.device, []).append(value)
        self.arriving: dict[torch.device, DeviceNumbers] = {}
        for device, tensors in on_device.items():
            with regions.region(None):
                self.arriving[device] = DeviceNumbers(torch.stack([tensor.reshape(()).double() for tensor in tensors]))

    def here(self) -> bool:
        """Whether all of them have arrived, so that `read` does not wait."""
        return all(numbers.here() for numbers in self.arriving.values())

    def read(self) -> Iterator[Event]:
        """The events; waits for the devices if it must."""
        landed = {device: iter(numbers.read()) for device, numbers in self.arriving.items()}
        for event in self.events:
            yield event.make([_read(value, landed) for value in event.values])


def _read(value: Tensor | float, landed: dict[torch.device, Iterator[float]]) -> float:
    if not isinstance(value, Tensor):
        return value
    return next(landed[value.device]) if value.device in landed else float(value.item())

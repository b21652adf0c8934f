"""The queue of events: batches of events wait for asynchronous copies of their numbers, then go to the sinks."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_patch.casts import regions
from amp_patch.diagnose.recording.run import Event
from amp_patch.diagnose.recording.sinks import Sink
from amp_patch.support.device_sync import DeviceNumbers

# The outbox is flushed after this number of events or of seconds, whichever comes first.
_FLUSH_EVENTS, _FLUSH_SECONDS = 50, 0.5


class UnreadEvent(NamedTuple):
    """An event whose numbers are not read yet.

    Attributes:
        values: the numbers, some of them in tensors of one element on a device.
        make: returns the event; called with the numbers of `values`, in the same order, once they are on the host.
    """

    values: list[Tensor | float]
    make: Callable[[list[float]], Event]


class UnreadBatch:
    """Events whose numbers are being copied to the host."""

    @torch.no_grad()
    def __init__(self, events: list[UnreadEvent]) -> None:
        self.events = events
        on_device: dict[torch.device, list[Tensor]] = {}
        for event in events:
            for value in event.values:
                if isinstance(value, Tensor) and value.is_cuda:
                    on_device.setdefault(value.device, []).append(value)
        self._arriving: dict[torch.device, DeviceNumbers] = {}
        for device, tensors in on_device.items():
            with regions.region(None):
                self._arriving[device] = DeviceNumbers(torch.stack([tensor.reshape(()).double() for tensor in tensors]))

    def has_arrived(self) -> bool:
        """Tell whether all numbers have arrived, so that `read` does not sync."""
        return all(numbers.here() for numbers in self._arriving.values())

    def read(self) -> Iterator[Event]:
        """Yield the events, made from their numbers. If numbers have not arrived, sync with their devices first."""
        landed = {device: iter(numbers.read()) for device, numbers in self._arriving.items()}
        for event in self.events:
            yield event.make([_read(value, landed) for value in event.values])


class Outbox:
    """Events for the sinks, in order. A sink that cannot write is taken out of the list, with a warning.

    Args:
        sinks: the list of sinks. Broken sinks are removed from the list itself, not from a copy.
    """

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks
        self._queue: list[UnreadEvent] = []
        self._travelling: list[UnreadBatch] = []
        self._flushed = time.monotonic()

    def put(self, event: Event) -> None:
        """Queue an event whose numbers are on the host."""
        self._queue.append(UnreadEvent([], lambda _: event))

    def put_unread(self, event: UnreadEvent) -> None:
        """Queue an event whose numbers may be on a device. A later `flush` copies them and passes the event on."""
        self._queue.append(event)

    def is_due(self) -> bool:
        """Tell whether it is time to `flush`."""
        return len(self._queue) >= _FLUSH_EVENTS or time.monotonic() - self._flushed >= _FLUSH_SECONDS

    def flush(self, step: int, wait: bool = False) -> None:
        """Start copies of the queued events' numbers to the host, and pass events to the sinks, in order.

        An event is passed if its numbers, and those of all earlier events, have arrived. Otherwise it waits for a later
        call. With `wait`, all events are passed, which syncs.

        Args:
            step: the number of steps so far, for the warning about a sink that cannot write.
        """
        self._flushed = time.monotonic()
        if self._queue:
            self._travelling.append(UnreadBatch(self._queue))
            self._queue = []
        while self._travelling and (wait or self._travelling[0].has_arrived()):
            for event in self._travelling.pop(0).read():
                self._each_sink(step, "add", event)
        self._each_sink(step, "flush")

    def close(self, step: int) -> None:
        """Close the sinks. Events that were not flushed are lost."""
        self._each_sink(step, "close")

    def _each_sink(self, step: int, name: str, *args: Any) -> None:
        """Call the method `name` of each sink that has it. If it raises an OSError, warn, and remove that sink."""
        for sink in list(self._sinks):
            try:
                if callable(method := getattr(sink, name, None)):
                    method(*args)
            except OSError as error:
                self._sinks.remove(sink)
                warnings.warn(f"record: the recording breaks off at step {step}: {error}", stacklevel=2)


def _read(value: Tensor | float, landed: dict[torch.device, Iterator[float]]) -> float:
    if not isinstance(value, Tensor):
        return value
    return next(landed[value.device]) if value.device in landed else float(value.item())

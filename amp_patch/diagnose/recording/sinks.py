"""Sinks, which receive the events of a recording: a file of JSON lines, and TensorBoard. A `Run` is a sink too."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from amp_patch.diagnose.recording.run import Event, dumps
from amp_patch.support.distributed import is_first_rank
from amp_patch.support.words import of_class


class Sink(Protocol):
    """Receiver of the events of a recording. `flush` and `close` are optional."""

    def add(self, event: Event) -> None:
        """Receive one event, in order, on the training's thread. After an OSError the sink receives no more events."""


class JsonLines:
    """A file with one line of JSON an event. In a torch.distributed job only rank 0 writes.

    Args:
        path: the file, which is overwritten; its folder must exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._lines: list[str] = []
        self._file = Path(path).open("w", encoding="utf-8") if writes() else None  # noqa: SIM115

    def add(self, event: Event) -> None:
        """Store the event's line until `flush`."""
        self._lines.append(dumps(event))

    def flush(self) -> None:
        """Write the stored lines to the file, and flush it, so that they survive a kill of the process."""
        if self._file is not None and self._lines and writes():
            try:
                self._file.write("".join(f"{line}\n" for line in self._lines))
                self._file.flush()
            except OSError:
                broken, self._file = self._file, None
                with suppress(OSError):  # `close` flushes, which fails again
                    broken.close()
                raise
        self._lines.clear()

    def close(self) -> None:
        """Flush and close the file."""
        self.flush()
        if self._file is not None:
            self._file.close()


class TensorBoard:
    """A sink of scalars to a SummaryWriter, or another object with `add_scalar(tag, value, step)`; it stays open.

    Tags are amp/loss, amp/loss_scale, amp/skipped, amp/seconds/step, amp/seconds/PART for each of PARTS and
    amp/samples_per_second. Figures of `amp.log` have their own names as tags.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._steps = 0

    def add(self, event: Event) -> None:
        """Write the scalars of a step, or of an `amp.log`; other events have none."""
        if not writes():
            return
        if event["event"] == "log":
            self._writer.add_scalar(event["name"], event["value"], event["step"])
        elif event["event"] == "step":
            for tag, value in _scalars(event).items():
                self._writer.add_scalar(f"amp/{tag}", value, self._steps)
            self._steps += 1


def _scalars(event: Event) -> dict[str, float]:
    seconds = event["seconds"]
    scalars = {"loss": event["loss"], "loss_scale": event["scale"], "skipped": float(event["skipped"])}
    if math.isfinite(seconds):
        scalars["seconds/step"] = seconds
        scalars.update((f"seconds/{part}", value) for part, value in event["parts"].items())
        if seconds > 0 and event["samples"]:
            scalars["samples_per_second"] = event["samples"] / seconds
    return scalars


def sinks_for(to: Any) -> list[Sink]:
    """Return the sinks of `amp.record(to)`."""
    if to is None:
        return []
    if isinstance(to, str | os.PathLike):
        return [JsonLines(to)]
    if callable(getattr(to, "add_scalar", None)):
        return [TensorBoard(to)]
    raise TypeError(
        f"record: to is {of_class(to)}; wanted a path (for lines of JSON), a TensorBoard SummaryWriter, or None"
    )


def writes() -> bool:
    """Tell whether this is rank 0, by torch.distributed or by torchrun's `RANK`."""
    return is_first_rank() and os.environ.get("RANK", "0") == "0"
